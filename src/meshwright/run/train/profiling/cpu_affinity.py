"""Cores that a rank has to itself, so that ranks which wait for each other stay apart.

A prediction takes every rank to have a core. Left to itself a system may see it otherwise: a thread
that is woken is often put next to the one that woke it, and ranks that wait for each other in every
layer wake each other hundreds of times a step. Two of them were found on one core in nine of ten
samples, with another core free.

Where there are fewer cores than ranks, ranks are dealt out to them in turn: neighbours wait for
each other most, and are on different ones.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


def count_available_cores() -> int:
    """Return how many cores this process may use."""
    return len(_allowed()) or os.cpu_count() or 1


def pin_rank_to_cores(rank: int, ranks: int) -> None:
    """Let this process, all of its threads, run on its share of the cores and on no other.

    Nothing happens where the system lets nobody choose.
    """
    mine = select_cores_of_rank(sorted(_allowed()), rank, ranks)
    if not mine:
        return
    # The backend's threads are there already, and the system binds threads one by one.
    for thread in _threads():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, mine)


def select_cores_of_rank(every: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """Return a rank's part of some cores, as many as all others get; one where ranks share them."""
    if 0 < len(every) < ranks:
        return [every[rank % len(every)]]
    each = len(every) // ranks
    return every[rank * each : (rank + 1) * each]


def make_timing_clock(ranks: int) -> Callable[[], float]:
    """Return the clock that times parts of a step: where ranks share cores, that of a core's time.

    How long something takes there depends on who else has work; what it needs of a core does not.
    """
    return time.process_time if ranks > count_available_cores() else time.perf_counter


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _threads() -> Iterable[int]:
    if not _THREADS.is_dir():
        return [0]
    return [int(each.name) for each in _THREADS.iterdir()]
