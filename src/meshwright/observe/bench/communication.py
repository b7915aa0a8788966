"""Collectives over all ranks, as nccl-tests measures them: by operation and size.

The size is that of the whole tensor. Size over time is the algorithm's bandwidth; times the factor
of `policy.collective.bus_bandwidth` it is the bus bandwidth, which can be held against a link's.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.bench_family import (
    BenchFamily,
    BenchTarget,
    CaseRunner,
    FailedCase,
    Size,
    build_row,
    prepare_nothing,
)
from meshwright.observe.bench.timing import TimingSamples
from meshwright.policy.collective.bus_bandwidth import bus_factor

Backend = Literal["gloo", "nccl"]

RANK_TIMEOUT_S = 120.0
"""How long ranks may take beyond their time: to start, to meet, and for the last case."""


class CommunicationFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Which exchanges a family measures."""

    name: str
    title: str
    ops: tuple[str, ...]
    gpu_sizes_bytes: dict[Size, tuple[int, ...]]
    """Bytes of each exchange over `nccl`."""
    cpu_sizes_bytes: dict[Size, tuple[int, ...]]
    """The same over `gloo`."""
    typical_s: dict[Size, float]
    """What it takes, with starting the ranks."""

    def build_family(self, ranks: int, backend: Backend) -> BenchFamily:
        """Return the family for so many ranks; of one alone it has no cases."""

        def cases(size: Size, _on_gpu: bool) -> tuple[BenchCase, ...]:
            sizes = self.gpu_sizes_bytes[size] if backend == "nccl" else self.cpu_sizes_bytes[size]
            return tuple(
                BenchCase(
                    family=self.name,
                    name=op,
                    sizes={"bytes": each, "ranks": ranks, "backend": backend},
                )
                for op in self.ops
                for each in sizes
                if ranks > 1
            )

        return BenchFamily(
            self.name,
            self.title,
            cases,
            prepare_nothing,
            runs_on_device=backend == "nccl",
            typical_s=self.typical_s,
            run_all=_sweep(ranks, backend),
        )


def _sweep(ranks: int, backend: Backend) -> CaseRunner:
    def sweep(
        cases: Sequence[BenchCase], _place: BenchTarget, end: float
    ) -> Iterator[BenchRow | FailedCase]:
        if ranks < 2:
            return
        import torch.distributed as dist

        joined = dist.is_available() and dist.is_initialized()
        if joined:
            cases = _agreed(cases)
        for _, group in groupby(cases, key=lambda case: case.name):
            yield from _timed(list(group), ranks, backend, end - time.monotonic(), joined)

    return sweep


def _timed(
    cases: Sequence[BenchCase], ranks: int, backend: Backend, left_s: float, joined: bool
) -> Iterator[BenchRow | FailedCase]:
    from meshwright.run.parallel.exchange_timing import (
        ExchangeCase,
        sample_exchanges,
    )
    from meshwright.run.parallel.launch.rank_spawner import RanksFailedError, spawn_ranks

    asked = [ExchangeCase(case.name, case.size("bytes")) for case in cases]
    if joined:
        # Whether time is up is rank 0's to say, inside.
        found = sample_exchanges(asked, ranks, left_s)
    elif left_s <= 0:
        return
    else:
        patience_s = left_s + RANK_TIMEOUT_S
        try:
            found = spawn_ranks(
                ranks, sample_exchanges, asked, ranks, left_s,
                timeout_s=patience_s, backend=backend,
            )[0]  # fmt: skip
        except RanksFailedError as fault:
            yield cases[0].key, str(fault).splitlines()[0]
            return
    for case, samples in zip(cases, found, strict=True):
        if samples:
            yield build_row(case, TimingSamples(samples), bytes=float(case.size("bytes")))


def _agreed(cases: Sequence[BenchCase]) -> list[BenchCase]:
    """Return the cases of rank 0, which alone reads the file of rows."""
    import torch.distributed as dist

    said: list[str | None] = [msgspec.json.encode(list(cases)).decode()]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    return msgspec.json.decode(said[0], type=list[BenchCase])


_KIB, _MIB = 1 << 10, 1 << 20

COLLECTIVE_EXCHANGES = CommunicationFamily(
    name="collectives",
    title="collectives between ranks",
    ops=("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    gpu_sizes_bytes={
        "full": tuple(_KIB << shift for shift in range(0, 21, 2)),
        "quick": (_KIB, 64 * _KIB, 4 * _MIB, 256 * _MIB),
    },
    cpu_sizes_bytes={
        "full": tuple(_KIB << shift for shift in range(0, 17, 2)),
        "quick": (_KIB, 64 * _KIB, 4 * _MIB),
    },
    typical_s={"quick": 6.5, "full": 20.0},
)


def compute_bus_bandwidth(row: BenchRow) -> float:
    """Return the bus bandwidth of a row of this family."""
    return (row.bytes_per_s or 0.0) * bus_factor(row.case.name, row.case.size("ranks"))


_KIB, _MIB = 1 << 10, 1 << 20

P2P_EXCHANGES = CommunicationFamily(
    name="p2p",
    title="messages between two ranks",
    ops=("one_way", "both_ways"),
    gpu_sizes_bytes={
        "full": (8, _KIB, 32 * _KIB, _MIB, 32 * _MIB, 512 * _MIB),
        "quick": (8, 32 * _KIB, 64 * _MIB),
    },
    cpu_sizes_bytes={
        "full": (8, _KIB, 32 * _KIB, _MIB, 16 * _MIB, 64 * _MIB),
        "quick": (8, 32 * _KIB, 16 * _MIB),
    },
    typical_s={"quick": 1.5, "full": 6.0},
)
