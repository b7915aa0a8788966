"""`spawn_ranks`: run a function on several processes of this machine that form a process group."""

import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from meshwright.errors import MeshwrightError
from meshwright.run.parallel.launch.store_server import (
    LOOPBACK,
    open_store_server,
    use_loopback_interface,
)


class RankResult(NamedTuple):
    """How one rank ended."""

    value: Any = None
    """What the function returned."""
    error: BaseException | None = None
    """What it raised; None where it returned."""
    exit_code: int | None = 0
    """What its process ended with; negative for a signal, None where it had to be ended."""
    wall_s: float = 0.0
    """When it ended, from the start of all."""


class RanksFailedError(MeshwrightError):
    """Some ranks of a launch raised, died or took too long."""

    def __init__(self, rank_results: Sequence[RankResult]) -> None:
        self.rank_results = tuple(rank_results)
        lines = [
            f"rank {rank}: {one.error or f'ended with exit code {one.exit_code}'}"
            for rank, one in enumerate(rank_results)
            if one.error is not None or one.exit_code != 0
        ]
        super().__init__("\n".join(lines))


def spawn_ranks(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    backend: str = "gloo",
) -> list[Any]:
    """Run `function(*args)` on each of so many ranks; return what each returned.

    With `nccl` every rank has the GPU of its number.
    """
    outcomes = spawn_ranks_with_results(
        ranks, function, *args, timeout_s=timeout_s, backend=backend
    )
    if any(one.error is not None or one.exit_code != 0 for one in outcomes):
        raise RanksFailedError(outcomes)
    return [one.value for one in outcomes]


def spawn_ranks_with_results(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    backend: str = "gloo",
) -> list[RankResult]:
    """Run as `spawn_ranks` does; return how each rank ended, well or not."""
    context = mp.get_context("forkserver")
    # The server loads once what its processes need; those forked from it start in milliseconds.
    # A main module may do anything when it is loaded, so that one is left to the ranks.
    theirs = {function.__module__} - {"__main__"}
    context.set_forkserver_preload(["torch.distributed", __name__, *theirs])
    # The store lives here, so that it outlives any rank.
    store = open_store_server()
    pairs = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(
            target=_rank, args=(_Place(rank, ranks, store.port, backend), end, function, args)
        )
        for rank, (_, end) in enumerate(pairs)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    for _, end in pairs:
        end.close()
    return _collect(processes, [reader for reader, _ in pairs], began, timeout_s)


def _collect(
    processes: Sequence[Any], readers: list[Connection], began: float, timeout_s: float
) -> list[RankResult]:
    outcomes = [RankResult(exit_code=None) for _ in processes]
    running = set(range(len(readers)))
    while running and (left := began + timeout_s - time.monotonic()) > 0:
        spoke = wait([readers[rank] for rank in running], timeout=left)
        now = time.monotonic() - began
        for rank in [rank for rank in running if readers[rank] in spoke]:
            running.discard(rank)
            try:
                # Each end of the pipe is a process of this call.
                value, error = pickle.loads(readers[rank].recv_bytes())  # noqa: S301
                outcomes[rank] = RankResult(value, error, 0, now)
            except EOFError:
                outcomes[rank] = RankResult(exit_code=None, wall_s=now)
    for rank, process in enumerate(processes):
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
        elif outcomes[rank].exit_code is None:
            outcomes[rank] = outcomes[rank]._replace(exit_code=process.exitcode)
    return outcomes


class _Place(NamedTuple):
    rank: int
    ranks: int
    port: int
    backend: str


def _rank(place: _Place, end: Connection, function: Callable[..., Any], args: Any) -> None:
    """Live the life of one rank."""
    _end_with_parent()
    torch.set_num_threads(1)  # ranks share the cores of this machine
    use_loopback_interface()
    value, error = None, None
    try:
        store = TCPStore(LOOPBACK, place.port, is_master=False, timeout=timedelta(seconds=60))
        if place.backend == "nccl":
            torch.cuda.set_device(place.rank)
        dist.init_process_group(place.backend, store=store, rank=place.rank, world_size=place.ranks)
        value = function(*args)
    except BaseException as raised:  # noqa: BLE001 - whatever it was, the parent is told
        error = _sendable(raised)
    end.send_bytes(pickle.dumps((value, error)))
    end.close()
    # Groups that lost a rank can hang in their destructors; this process has said all it had to.
    os._exit(0)


def _end_with_parent() -> None:
    """Ask Linux to end this process when whoever forked it is gone, however it went."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(death_signal, signal.SIGKILL)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - its own bytes
    except Exception:  # noqa: BLE001 - exceptions may refuse in any way
        return RuntimeError("".join(traceback.format_exception(error)))
    error.add_note("".join(traceback.format_exception(error)))
    return error
