"""`run_collective_bench`: how fast collectives run here, and whether their results are right.

Sizes grow by a factor, as in nccl-tests: the size is the larger of what one rank gives and gets,
algbw is size over time, and busbw is algbw scaled to what links carry, so that it can be compared
over rank counts (nccl-tests, doc/PERFORMANCE.md). Elements that are wrong are counted, not sampled.
"""

import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.policy.collective.bus_bandwidth import bus_factor
from meshwright.policy.collective.collective import SEPARATE_OUTPUT_OPS, Collective
from meshwright.run.parallel.collective.bench.bench_row import (
    CollectiveBenchRow,
    MessageSizeSweep,
    count_elements,
)
from meshwright.run.parallel.collective.bench.mpi import run_mpi_bench
from meshwright.run.parallel.collective.bench.test_data import (
    make_expected_output,
    make_full_message,
    make_input_data,
)
from meshwright.run.parallel.collective.bench.torch_native import run_torch_collective
from meshwright.run.parallel.collective.chunk_layout import ChunkLayout
from meshwright.run.parallel.collective.communicator import RankCommunicator
from meshwright.run.parallel.collective.executor import CollectiveExecutor
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.launch.world import init_process_group, read_world

TORCH_NATIVE = "native"
"""Stands for the backend's own algorithm."""


def run_collective_bench(
    collectives: Sequence[Collective], sweep: MessageSizeSweep, *, timeout_s: float = 600.0
) -> list[CollectiveBenchRow]:
    """Measure collectives of one operation; every rank returns all rows.

    In a process group, or under torchrun, all its ranks call this. Otherwise processes are started
    on this machine, as many as the collectives have ranks, over gloo. With the backend `mpi` only
    the operation counts: an MPI library carries it out with algorithms of its own.
    """
    ranks = _common_ranks(collectives)
    if sweep.backend == "mpi":
        return run_mpi_bench(collectives[0], sweep, timeout_s=timeout_s)
    if dist.is_initialized():
        return _measure_all(collectives, sweep)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join_started_ranks(sweep.backend)
        try:
            return _measure_all(collectives, sweep)
        finally:
            dist.destroy_process_group()
    if sweep.backend != "gloo":
        hint = "start it under torchrun, one process per GPU"
        raise MissingDependency("processes started here can only use gloo", hint)
    rows: list[CollectiveBenchRow] = spawn_ranks(
        ranks, _measure_all, collectives, sweep, timeout_s=timeout_s
    )[0]
    return rows


def _join_started_ranks(backend: str) -> None:
    """Form the group of the processes that a launcher started."""
    world = read_world()
    if world.size > 1:
        init_process_group(world, "cuda" if backend == "nccl" else "cpu")
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _common_ranks(collectives: Sequence[Collective]) -> int:
    kinds = {(one.op, one.ranks, one.root, one.counts, one.peers) for one in collectives}
    if len(kinds) != 1:
        what = f"{len(kinds)} different operations, rank counts or roots in one sweep"
        raise InputError([Problem("collectives", what, "measure one operation at a time")])
    return collectives[0].ranks


def _measure_all(
    collectives: Sequence[Collective], sweep: MessageSizeSweep
) -> list[CollectiveBenchRow]:
    device = torch.device("cpu")
    if sweep.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        torch.cuda.set_device(device)
    team = RankCommunicator(transport=sweep.transport, timeout_s=60.0)
    contenders: list[CollectiveExecutor | None] = [None] if sweep.baseline else []
    contenders += [CollectiveExecutor(collective, team) for collective in collectives]
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
        team: RankCommunicator,
        sweep: MessageSizeSweep,
        size_bytes: int,
        device: torch.device,
    ) -> None:
        self._collective, self._team, self._sweep = collective, team, sweep
        self._dtype: torch.dtype = getattr(torch, sweep.dtype)
        elements = count_elements(collective, size_bytes, self._dtype)
        self._cuts = ChunkLayout(collective, elements)
        self._device = device

    @property
    def _size_bytes(self) -> int:
        """The larger of what one rank gives and gets, over all ranks."""
        most = 0
        for rank in range(self._collective.ranks):
            most = max(most, *(size or 0 for size in self._cuts.get_tensor_sizes(rank)))
        return most * self._dtype.itemsize

    def row(self, executor: CollectiveExecutor | None, *, in_place: bool) -> CollectiveBenchRow:
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
        return CollectiveBenchRow(
            op=self._collective.op,
            algorithm=TORCH_NATIVE if executor is None else executor.collective.name,
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
        self, executor: CollectiveExecutor | None, *, in_place: bool
    ) -> tuple[Callable[[], object], Callable[[], int]]:
        """Return what is to be timed, and what counts the wrong elements after its first run."""
        rank, cuts, collective = self._team.rank, self._cuts, self._collective
        sizes = cuts.get_tensor_sizes(rank)
        whole = make_full_message(collective, rank, cuts.elements, self._dtype).to(self._device)
        mine = make_input_data(collective, rank, cuts, self._dtype)
        mine = None if mine is None else mine.to(self._device)
        out = None if sizes.output_elements is None else whole.new_empty(sizes.output_elements)
        if in_place and collective.op not in SEPARATE_OUTPUT_OPS:
            # The part of a rank lies in the whole message, as in nccl-tests.
            mine = _own(whole, sizes.input_elements, rank)
            out = _own(whole, sizes.output_elements, rank)
        right = make_expected_output(collective, rank, cuts, self._dtype)

        def wrong() -> int:
            if right is None or out is None:
                return 0
            return int((out.cpu() != right).sum())

        if executor is None:
            group, elements = self._team.group, cuts.elements
            return lambda: run_torch_collective(
                collective, group, mine, out, elements=elements
            ), wrong
        if in_place and collective.op not in SEPARATE_OUTPUT_OPS:
            return lambda: executor.run_in_place(whole), wrong
        some = whole if mine is None and out is None else mine
        return lambda: executor.run(some, out, chunk_elements=cuts.elements), wrong

    def _settle(self) -> None:
        dist.barrier(self._team.group)

    def _over_ranks(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        shared = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(shared, op=how, group=self._team.group)
        return float(shared.item())


def _own(whole: torch.Tensor, size: int | None, rank: int) -> torch.Tensor | None:
    if size is None or size == whole.numel():
        return None if size is None else whole
    return whole[rank * size : (rank + 1) * size]
