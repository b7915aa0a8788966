"""`build_round_schedule`: schedules with few rounds, for latency-bound messages.

In one round each link of a GPU carries one transfer out and one in, of as many chunks as there are
to tell. Transfers are chosen greedily by what they tell that is new and how late it arrives; of
many tries with different tastes the one whose rounds take least time is kept. Summing is the same
in reverse.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective, CollectiveOp
from meshwright.policy.collective.synthesis.max_flow import list_set_bits
from meshwright.spec.cluster.routing_table import Arc, RoutingTable

NUM_TRIES = 24
_INSTANT_S = 1e-9


class RoundTransfer(NamedTuple):
    """A transfer of a round."""

    src: int
    dst: int
    source_ranks: int
    """The ranks whose data it carries, as bits."""


Rounds = list[list[RoundTransfer]]


class _Way(NamedTuple):
    src: int
    dst: int
    leaves: Arc
    arrives: Arc
    latency_s: float


def build_round_schedule(ways: RoutingTable, op: CollectiveOp, root: int) -> tuple[Collective, str]:
    """Return a schedule of few rounds, and what to say about it."""
    backwards = op in ("reduce_scatter", "reduce")
    offers = _ways(ways, backwards)
    if op in ("broadcast", "reduce"):
        chunks, begin = 1, [int(rank == root) for rank in range(ways.gpus)]
    else:
        chunks, begin = ways.gpus, [1 << rank for rank in range(ways.gpus)]
    time_s, rounds = _best(offers, begin)
    if op == "all_reduce":
        time_s *= 2
    builder = CollectiveBuilder("synthesised-rounds", op, ranks=ways.gpus, chunks=chunks, root=root)
    if op in ("reduce_scatter", "reduce", "all_reduce"):
        for together in reversed(rounds):
            _emit(
                builder,
                builder.add,
                [RoundTransfer(t.dst, t.src, t.source_ranks) for t in together],
            )
    if op in ("all_gather", "broadcast", "all_reduce"):
        for together in rounds:
            _emit(builder, builder.copy, together)
    count = len(rounds) * (2 if op == "all_reduce" else 1)
    late = f"; links alone delay it by {time_s * 1e6:.3g} us" if time_s > count * _INSTANT_S else ""
    rounds_said = "1 round" if count == 1 else f"{count} rounds"
    return builder.build(), f"{rounds_said}, one transfer per link of a GPU in each{late}"


def _ways(ways: RoutingTable, backwards: bool) -> list[_Way]:
    found = []
    for a in range(ways.gpus):
        for b in range(ways.gpus):
            way = ways.find_direct_path(b, a) if backwards else ways.find_direct_path(a, b)
            if way is not None:
                arcs = way.arcs
                first, last = (arcs[-1], arcs[0]) if backwards else (arcs[0], arcs[-1])
                found.append(_Way(a, b, first, last, max(way.latency_s, _INSTANT_S)))
    return found


def _best(ways: list[_Way], begin: list[int]) -> tuple[float, Rounds]:
    random = Random(0)
    late = {way[:2]: way.latency_s for way in ways}
    limits = sorted({round(latency_s, 9) for latency_s in late.values()})
    best: tuple[float, Rounds] | None = None
    for attempt in range(NUM_TRIES):
        noise = 0.2 if attempt >= 2 * len(limits) else 0.0
        taste = {way[:2]: 1 + noise * random.random() for way in ways}
        limit_s = limits[attempt // 2 % len(limits)] + _INSTANT_S
        rounds = _tell(ways, begin, taste, limit_s, late_first=attempt % 2 == 0)
        time_s = sum(max(late[told[:2]] for told in together) for together in rounds)
        if best is None or time_s < best[0] * (1 - 1e-9):
            best = time_s, rounds
    assert best is not None
    return best


def _tell(
    ways: list[_Way],
    begin: list[int],
    taste: dict[tuple[int, int], float],
    limit_s: float,
    *,
    late_first: bool,
) -> Rounds:
    """Fill rounds until all know all; ways slower than the limit serve where nothing else can.

    A round takes as long as its slowest way, so those are best used together: at once, where
    `late_first`, or else when the quick ones have told what they can.
    """
    held = list(begin)
    every = 0
    for shares in begin:
        every |= shares
    quick = [way for way in ways if way.latency_s <= limit_s]
    rounds: Rounds = []
    while any(shares != every for shares in held):
        together = [] if late_first and not rounds else _round(quick, held, taste)
        together = together or _round(ways, held, taste)
        rounds.append(together)
        for told in together:
            held[told.dst] |= told.source_ranks
    return rounds


def _round(
    ways: list[_Way], held: list[int], taste: dict[tuple[int, int], float]
) -> list[RoundTransfer]:
    """Choose transfers by what they tell, until no link of a GPU is free for another."""
    coming = [0] * len(held)
    busy: set[tuple[str, Arc]] = set()
    together: list[RoundTransfer] = []
    offers = [
        (taste[way[:2]] * new.bit_count(), -((way.dst - way.src) % len(held)), way)
        for way in ways
        if (new := held[way.src] & ~held[way.dst])
    ]
    for _, _, way in sorted(offers, reverse=True):
        new = held[way.src] & ~held[way.dst] & ~coming[way.dst]
        ports = {("out", way.leaves), ("in", way.arrives)}
        if new and not ports & busy:
            busy |= ports
            coming[way.dst] |= new
            together.append(RoundTransfer(way.src, way.dst, new))
    return together


def _emit(
    builder: CollectiveBuilder, move: Callable[..., None], together: list[RoundTransfer]
) -> None:
    """Write one round; sums that meet in one slot take turns."""
    left = [(told.src, told.dst, run) for told in together for run in _runs(told.source_ranks)]
    while left:
        written: set[tuple[int, int]] = set()
        later = []
        with builder.step():
            for src, dst, (first, count) in left:
                cells = {(dst, slot) for slot in range(first, first + count)}
                if cells & written:
                    later.append((src, dst, (first, count)))
                    continue
                written |= cells
                move(src, dst, chunk=first, count=count)
        left = later


def _runs(shares: int) -> list[tuple[int, int]]:
    """Return runs of neighbouring bits as first and count."""
    runs: list[tuple[int, int]] = []
    for bit in list_set_bits(shares):
        if runs and sum(runs[-1]) == bit:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((bit, 1))
    return runs
