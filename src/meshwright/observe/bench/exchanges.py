"""Families whose cases are exchanges between ranks: of a running job, or started here for them.

Where a launcher started this process among others, all of them sweep together and rank 0 says which
cases are missing. Otherwise ranks are started on this machine, one operation at a time, so that
rows are kept as they come.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from meshwright.observe.bench.case import Case, Row
from meshwright.observe.bench.family import Family, Fault, Place, Size, Sweep, no_work, row_of
from meshwright.observe.bench.timing import Timed

Backend = Literal["gloo", "nccl"]
PATIENCE_S = 120.0
"""How long ranks may take beyond their time: to start, to meet, and for the last case."""


class Exchanges(msgspec.Struct, frozen=True, kw_only=True):
    """Which exchanges a family measures."""

    name: str
    title: str
    ops: tuple[str, ...]
    on_gpu: dict[Size, tuple[int, ...]]
    """Bytes of each exchange over `nccl`."""
    on_host: dict[Size, tuple[int, ...]]
    """The same over `gloo`."""
    usual_s: dict[Size, float]
    """What it takes, with starting the ranks."""

    def family(self, ranks: int, backend: Backend) -> Family:
        """Return the family for so many ranks; of one alone it has no cases."""

        def cases(size: Size, _on_gpu: bool) -> tuple[Case, ...]:
            sizes = self.on_gpu[size] if backend == "nccl" else self.on_host[size]
            return tuple(
                Case(
                    family=self.name,
                    name=op,
                    sizes={"bytes": each, "ranks": ranks, "backend": backend},
                )
                for op in self.ops
                for each in sizes
                if ranks > 1
            )

        return Family(
            self.name,
            self.title,
            cases,
            no_work,
            on_device=backend == "nccl",
            usual_s=self.usual_s,
            sweep=_sweep(ranks, backend),
        )


def _sweep(ranks: int, backend: Backend) -> Sweep:
    def sweep(cases: Sequence[Case], _place: Place, end: float) -> Iterator[Row | Fault]:
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
    cases: Sequence[Case], ranks: int, backend: Backend, left_s: float, joined: bool
) -> Iterator[Row | Fault]:
    from meshwright.run.parallel.collective.launch import RanksFailed, launch
    from meshwright.run.parallel.exchange_samples import Asked, sample_exchanges

    asked = [Asked(case.name, case.size("bytes")) for case in cases]
    if joined:
        # Whether time is up is rank 0's to say, inside.
        found = sample_exchanges(asked, ranks, left_s)
    elif left_s <= 0:
        return
    else:
        patience_s = left_s + PATIENCE_S
        try:
            found = launch(
                ranks, sample_exchanges, asked, ranks, left_s,
                timeout_s=patience_s, backend=backend,
            )[0]  # fmt: skip
        except RanksFailed as fault:
            yield cases[0].key, str(fault).splitlines()[0]
            return
    for case, samples in zip(cases, found, strict=True):
        if samples:
            yield row_of(case, Timed(samples), bytes=float(case.size("bytes")))


def _agreed(cases: Sequence[Case]) -> list[Case]:
    """Return the cases of rank 0, which alone reads the file of rows."""
    import torch.distributed as dist

    said: list[str | None] = [msgspec.json.encode(list(cases)).decode()]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    return msgspec.json.decode(said[0], type=list[Case])
