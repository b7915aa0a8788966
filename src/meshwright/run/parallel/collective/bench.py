"""`bench`: how fast collectives run here, and whether their results are right.

Sizes grow by a factor, as in nccl-tests: the size is the larger of what one rank gives and gets,
algbw is size over time, and busbw is algbw scaled to what links carry, so that it can be compared
over rank counts (nccl-tests, doc/PERFORMANCE.md). Elements that are wrong are counted, not sampled.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.policy.collective.bus import bus_factor
from meshwright.policy.collective.collective import EXCHANGED, SPLIT, Collective
from meshwright.run.parallel.collective.cuts import Cuts
from meshwright.run.parallel.collective.executor import Executor
from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.collective.native import run_native
from meshwright.run.parallel.collective.samples import expected, given, message
from meshwright.run.parallel.collective.team import Team, Transport

NATIVE = "native"
"""Stands for the backend's own algorithm."""
Backend = Literal["gloo", "nccl", "mpi"]


class SizeSweep(msgspec.Struct, frozen=True, kw_only=True):
    """Which sizes are measured, and how."""

    begin_bytes: int = 1 << 10
    end_bytes: int = 1 << 24
    factor: int = 4
    dtype: str = "float32"
    warmup: int = 2
    iterations: int = 10
    backend: Backend = "gloo"
    transport: Transport = "auto"
    native: bool = True
    """Whether the backend's own algorithm is measured too."""

    def __post_init__(self) -> None:
        problems = []
        if self.begin_bytes < 1 or self.end_bytes < self.begin_bytes:
            what = f"{self.begin_bytes:,} to {self.end_bytes:,} bytes"
            problems.append(Problem("sizes", what, "begin with 1 or more and end no lower"))
        if self.factor < 2:
            problems.append(Problem("factor", f"{self.factor}", "use 2 or more"))
        if self.warmup < 0 or self.iterations < 1:
            what = f"{self.warmup} to warm up and {self.iterations} to measure"
            problems.append(Problem("iterations", what, "measure 1 or more"))
        kind = getattr(torch, self.dtype, None)
        if not isinstance(kind, torch.dtype):
            problems.append(Problem("dtype", f"{self.dtype!r} is no type", "such as float32"))
        if problems:
            raise InputError(problems)

    def sizes(self) -> Iterator[int]:
        """Return the sizes, in bytes."""
        size = self.begin_bytes
        while size <= self.end_bytes:
            yield size
            size *= self.factor


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    op: str
    algorithm: str
    transport: str
    """`shared`, `torch`, or the backend where the algorithm is its own."""
    ranks: int
    dtype: str
    size_bytes: int
    elements: int
    in_place: bool
    time_us: float
    """Mean of the iterations on the slowest rank."""
    algbw_gbps: float
    """Size over time, in 10⁹ bytes per second."""
    busbw_gbps: float
    wrong: int
    """Elements that differ from the right result, over all ranks."""


def bench(
    collectives: Sequence[Collective], sweep: SizeSweep, *, timeout_s: float = 600.0
) -> list[Row]:
    """Measure collectives of one operation; every rank returns all rows.

    In a process group, or under torchrun, all its ranks call this. Otherwise processes are started
    on this machine, as many as the collectives have ranks, over gloo. With the backend `mpi` only
    the operation counts: an MPI library carries it out with algorithms of its own.
    """
    ranks = _common_ranks(collectives)
    if sweep.backend == "mpi":
        from meshwright.run.parallel.collective.mpi import mpi_rows

        return mpi_rows(collectives[0], sweep, timeout_s=timeout_s)
    if dist.is_initialized():
        return _measure_all(collectives, sweep)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(sweep.backend)
        try:
            return _measure_all(collectives, sweep)
        finally:
            dist.destroy_process_group()
    if sweep.backend != "gloo":
        hint = "start it under torchrun, one process per GPU"
        raise MissingPart("processes started here can only use gloo", hint)
    rows: list[Row] = launch(ranks, _measure_all, collectives, sweep, timeout_s=timeout_s)[0]
    return rows


def _common_ranks(collectives: Sequence[Collective]) -> int:
    kinds = {(one.op, one.ranks, one.root, one.counts, one.peers) for one in collectives}
    if len(kinds) != 1:
        what = f"{len(kinds)} different operations, rank counts or roots in one sweep"
        raise InputError([Problem("collectives", what, "measure one operation at a time")])
    return collectives[0].ranks


def _measure_all(collectives: Sequence[Collective], sweep: SizeSweep) -> list[Row]:
    device = torch.device("cpu")
    if sweep.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        torch.cuda.set_device(device)
    team = Team(transport=sweep.transport, patience_s=60.0)
    contenders: list[Executor | None] = [None] if sweep.native else []
    contenders += [Executor(collective, team) for collective in collectives]
    rows = []
    for size in sweep.sizes():
        case = _Case(collectives[0], team, sweep, size, device)
        for executor in contenders:
            rows += [case.row(executor, in_place=in_place) for in_place in (False, True)]
    team.close()
    return rows


class _Case:
    """One size, measured with any algorithm."""

    def __init__(
        self,
        collective: Collective,
        team: Team,
        sweep: SizeSweep,
        size_bytes: int,
        device: torch.device,
    ) -> None:
        self._collective, self._team, self._sweep = collective, team, sweep
        self._dtype: torch.dtype = getattr(torch, sweep.dtype)
        elements = elements_of(collective, size_bytes, self._dtype)
        self._cuts = Cuts(collective, elements)
        self._device = device

    @property
    def _size_bytes(self) -> int:
        """The larger of what one rank gives and gets, over all ranks."""
        most = 0
        for rank in range(self._collective.ranks):
            most = max(most, *(size or 0 for size in self._cuts.sizes(rank)))
        return most * self._dtype.itemsize

    def row(self, executor: Executor | None, *, in_place: bool) -> Row:
        """Check one run, then time many."""
        run, check = self._prepared(executor, in_place=in_place)
        self._settle()
        run()
        wrong = self._over_ranks(float(check()), dist.ReduceOp.SUM)
        for _ in range(self._sweep.warmup):
            run()
        self._settle()
        began = time.perf_counter()
        for _ in range(self._sweep.iterations):
            run()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        mine = (time.perf_counter() - began) / self._sweep.iterations
        seconds = self._over_ranks(mine, dist.ReduceOp.MAX)
        size, ranks = self._size_bytes, self._collective.ranks
        rate = size / seconds / 1e9
        return Row(
            op=self._collective.op,
            algorithm=NATIVE if executor is None else executor.collective.name,
            transport=self._sweep.backend if executor is None else self._team.transport,
            ranks=ranks,
            dtype=self._sweep.dtype,
            size_bytes=size,
            elements=size // self._dtype.itemsize,
            in_place=in_place,
            time_us=seconds * 1e6,
            algbw_gbps=rate,
            busbw_gbps=rate * bus_factor(self._collective.op, ranks),
            wrong=int(wrong),
        )

    def _prepared(
        self, executor: Executor | None, *, in_place: bool
    ) -> tuple[Callable[[], object], Callable[[], int]]:
        """Return what is to be timed, and what counts the wrong elements after its first run."""
        rank, cuts, collective = self._team.rank, self._cuts, self._collective
        sizes = cuts.sizes(rank)
        whole = message(collective, rank, cuts.elements, self._dtype).to(self._device)
        mine = given(collective, rank, cuts, self._dtype)
        mine = None if mine is None else mine.to(self._device)
        out = None if sizes.wanted is None else whole.new_empty(sizes.wanted)
        if in_place and collective.op not in EXCHANGED:
            # The part of a rank lies in the whole message, as in nccl-tests.
            mine = _own(whole, sizes.given, rank)
            out = _own(whole, sizes.wanted, rank)
        right = expected(collective, rank, cuts, self._dtype)

        def wrong() -> int:
            if right is None or out is None:
                return 0
            return int((out.cpu() != right).sum())

        if executor is None:
            group, elements = self._team.group, cuts.elements
            return lambda: run_native(collective, group, mine, out, elements=elements), wrong
        if in_place and collective.op not in EXCHANGED:
            return lambda: executor.run_in_place(whole), wrong
        some = whole if mine is None and out is None else mine
        return lambda: executor.run(some, out, chunk_elements=cuts.elements), wrong

    def _settle(self) -> None:
        dist.barrier(self._team.group)

    def _over_ranks(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        shared = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(shared, op=how, group=self._team.group)
        return float(shared.item())


def elements_of(collective: Collective, size_bytes: int, dtype: torch.dtype) -> int:
    """Return the elements of a message of about a size (of a chunk, for all_to_all_v)."""
    elements = max(1, size_bytes // dtype.itemsize)
    if collective.op == "all_to_all_v":
        return max(1, elements // max(1, *map(sum, collective.counts)))
    if collective.op in SPLIT:
        return max(1, elements // collective.ranks) * collective.ranks
    return elements


def _own(whole: torch.Tensor, size: int | None, rank: int) -> torch.Tensor | None:
    if size is None or size == whole.numel():
        return None if size is None else whole
    return whole[rank * size : (rank + 1) * size]
