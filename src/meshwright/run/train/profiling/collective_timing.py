"""What messages and collectives between this machine's processes take, by size.

They go through `GroupCoordinator`, as a step's do, so that what Python adds is in. All groups of a
size work at once, as those of a layout would, and each has computed something before, as between
two exchanges of a step: whoever exchanges without a pause finds the other rank awake, and its own
data in the cache.
"""

import time
from collections.abc import Callable
from statistics import fmean, median
from typing import NamedTuple

import torch

from meshwright.run.parallel.exchange_timing import (
    TimedExchange,
    prepare_exchange,
    prepare_p2p,
)
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.mesh import Mesh
from meshwright.spec.layout import Layout

MESSAGE_BYTES = (64, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the whole tensor; beyond the largest, time grows with size."""
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_CPU = torch.device("cpu")
_WARM, _ROUNDS = 2, 20
_LEAST_S, _MOST = 0.1, 60
"""How long a size is repeated, and how often at most."""
_ROWS, _WIDTH = 128, 512
"""A product of 0.07 GFLOP that reads a megabyte: about a millisecond of a core."""

SizeTimes = tuple[tuple[float, float], ...]
"""Bytes and seconds, from small to large."""


class CollectiveTimings(NamedTuple):
    """What exchanges take."""

    collectives: dict[str, SizeTimes]
    """By operation and ranks, such as `all_reduce 2`; bytes of the whole tensor."""
    message_times: SizeTimes
    """From one rank until another has it; nothing where this rank has no other."""
    message_cpu_times: SizeTimes
    """What one end of a message takes from its core, meanwhile or not."""
    send_recv_times: SizeTimes
    """A message to another rank and one from there, both at once, as in a turn of a ring."""
    flatten_times: SizeTimes
    """Gradients laid side by side."""


def time_collectives(
    ranks: int, clock: Callable[[], float] = time.perf_counter
) -> CollectiveTimings:
    """Time all of them on this rank; every rank of the process group calls it."""
    mesh = Mesh(Layout(dp=ranks))
    found: dict[str, SizeTimes] = {}
    for count in range(2, ranks + 1):
        if ranks % count:
            continue
        group = mesh["dp"] if count == ranks else mesh.get_subgroup("dp", count)
        for op in _COLLECTIVES:
            found[f"{op} {count}"] = tuple(
                (
                    float(size),
                    _timed(prepare_exchange(op, group, size, _CPU).run, mesh.world, clock),
                )
                for size in MESSAGE_BYTES
            )
    message, cpu, turn = [], [], []
    if ranks > 1:
        pair = mesh["dp"] if ranks == 2 or ranks % 2 else mesh.get_subgroup("dp", 2)
        for size in MESSAGE_BYTES:
            one_way, both_ways = (
                prepare_p2p(pair, size, _CPU, at_once=each, between=(0, 1))
                for each in (False, True)
            )
            wall_s, own_s = _one_way(one_way)
            message.append((float(size), wall_s))
            cpu.append((float(size), own_s))
            turn.append((float(size), _timed(both_ways.run, mesh.world, clock)))
        if pair.index > 1:  # of an odd number the last have nobody to talk to
            message, cpu, turn = [], [], []
    collect = tuple(
        (float(size), _timed(_collect(size), mesh.world, clock)) for size in MESSAGE_BYTES
    )
    return CollectiveTimings(found, tuple(message), tuple(cpu), tuple(turn), collect)


def _timed(
    work: Callable[[], object], world: GroupCoordinator, clock: Callable[[], float]
) -> float:
    """Return how long something takes on the mean, done as often as is worth it.

    A step does it hundreds of times, so what counts is the sum, and not the usual length.
    """
    taken: list[float] = []
    count = _MOST
    x, weight = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    for number in range(_WARM + _MOST):
        _ = x @ weight  # as a step would between two of them
        start = clock()
        work()
        taken.append(clock() - start)
        if number == _WARM - 1:
            # All have to agree how often.
            guess = torch.tensor([taken[-1]], dtype=torch.float64)
            each = float(world.all_reduce(guess, "max")) or 1e-9
            count = min(_MOST, max(5, round(_LEAST_S / each)))
            taken.clear()
        if number >= _WARM - 1 + count:
            break
    return fmean(taken)


def _collect(size: int) -> Callable[[], None]:
    """Copy gradients to one flat tensor, as a bucket does before it leaves."""
    given = [torch.zeros(max(1, size // 16)) for _ in range(4)]

    def work() -> None:
        flat = torch.zeros(sum(map(len, given)))
        torch._foreach_copy_(list(flat.split_with_sizes([len(each) for each in given])), given)

    return work


def _one_way(call: TimedExchange) -> tuple[float, float]:
    """Return how long a message takes one way, and what it takes from the core of one end."""
    walls: list[float] = []
    own = 0.0
    for number in range(_WARM + _ROUNDS):
        if number == _WARM:
            walls.clear()
            own = time.process_time()
        start = time.perf_counter()
        call.run()
        walls.append(time.perf_counter() - start)
    return call.time_fraction * median(walls), call.time_fraction * (
        time.process_time() - own
    ) / _ROUNDS
