"""Gradients and parameters travel in buckets, behind the passes that make or need them.

A stage's gradients are ready layer by layer while its last backward runs; its parameters are
gathered layer by layer ahead of its first forward. A bucket is one layer here. What does not fit
behind the pass is exposed: at least the last (or first) bucket, which nothing can hide. What
travels with every pass is not known here: fully sharded parameters, and the gradients that ZeRO 2
scatters after all microbatches but the last.
"""

from operator import add, attrgetter
from typing import NamedTuple

import msgspec

from meshwright.predict.bubble import Edge, Pipeline, begun_s, done_s, ends_apart
from meshwright.predict.measured import exchange_s
from meshwright.predict.run import Run
from meshwright.spec.layout import RankParameters, rank_parameters, split_layers
from meshwright.spec.layout.states import STATE_BYTES


class Exchange(NamedTuple):
    """Seconds one rank's collectives take in a step, hidden or not."""

    reduce_s: float = 0.0
    """Gradients, after they are summed up."""
    gather_s: float = 0.0
    """Updated parameters, before their use."""


def exchange_of(run: Run, held: RankParameters) -> Exchange:
    """Return how long gradients and parameters that a rank trains travel, if nothing hides them."""
    layout = run.layout
    if layout.dp * layout.cp == 1:
        return Exchange()
    found = _exchange(run, "dp-cp", float(held.matrices + held.others))
    if held.experts and layout.expert_dp > 1:
        more = _exchange(run, "expert_dp", float(held.experts))
        found = Exchange(*map(add, found, more))
    return found


def _exchange(run: Run, axes: str, parameters: float) -> Exchange:
    """Exchange some parameters within the group along some axes."""
    layout = run.layout
    gradients = parameters * STATE_BYTES[layout.gradient_precision]
    reduce_s = gather_s = 0.0
    if layout.shard is not None and axes == "dp-cp" and layout.zero:
        # Copies of the sharded states add up their shards among each other.
        reduce_s = exchange_s(run, "replicate", "all_reduce", gradients / layout.shard_degree)
        axes = "shard"
    if layout.zero == 3:
        return Exchange(reduce_s)  # the rest travels with every pass
    if layout.zero == 0 or not run.software.overlap_exchange:
        reduce_s += exchange_s(run, axes, "all_reduce", gradients)
    else:
        reduce_s += exchange_s(run, axes, "reduce_scatter", gradients)
    if layout.zero:
        gather_s = exchange_s(run, axes, "all_gather", parameters * run.number_bytes)
    if run.measured is not None:
        reduce_s += run.measured.collect.seconds(gradients)
    return Exchange(reduce_s, gather_s)


class Held(NamedTuple):
    """A chunk as the data-parallel lane of its rank sees it."""

    share: float
    """Of the rank's parameters."""
    layers: int
    start_s: float
    """When its first forward, or its last backward, starts."""
    end_s: float
    """When that pass ends."""

    @property
    def buckets(self) -> int:
        """One per layer, and one where a chunk has none."""
        return max(1, self.layers)

    @property
    def bucket(self) -> float:
        """The share of one."""
        return self.share / self.buckets


class Around(NamedTuple):
    """What a step adds to its passes."""

    exchange_s: float
    """Waiting for parameters and gradients."""
    update_s: float
    """Gradient norm and update, with the transfers to and from host memory around them."""


def around_passes(
    run: Run, parameters: tuple[RankParameters, ...], updates: tuple[float, ...], pipe: Pipeline
) -> Around:
    """Return what a step waits for parameters before its passes, for gradients and for the update.

    `parameters`, those that are trained, and `updates` (seconds) are those of every rank. Who would
    idle anyway waits for nothing.
    """
    exchanges = {held: exchange_of(run, held) for held in set(parameters)}
    if any(map(any, exchanges.values())):
        size, layers = chunk_sizes(run), split_layers(run.layout, run.model.layers)
        lanes = [
            _Lane(run, edges, exchanges[held], size, layers)
            for edges, held in zip(pipe.edges, parameters, strict=True)
        ]
    else:
        lanes = []
    if ends_apart(run):
        return _by_itself(pipe.edges, lanes, updates)
    before = after = 0.0
    for lane in lanes:
        if lane.exchange.gather_s - begun_s(lane.edges) > before:
            before = max(before, *lane.late_s())
        if lane.exchange.reduce_s + done_s(lane.edges) > after:
            after = max(after, lane.reduced_s())
    return Around(before + after, max(updates))


def _by_itself(
    edges: tuple[tuple[Edge, ...], ...], lanes: list["_Lane"], updates: tuple[float, ...]
) -> Around:
    """Return the same where every rank goes round by itself: the longest round is the step."""
    spans = [done_s(own) - begun_s(own) for own in edges]
    longest = max(map(add, spans, updates))
    if not lanes:
        return Around(0.0, longest - max(spans))
    late = [lane.late_s() for lane in lanes]
    # Later chunks may wait longer than first ones, and then hold up all.
    more = max(map(max, late)) - max(own[0] for own in late)
    rounds = [own[0] + more + lane.reduced_s() for own, lane in zip(late, lanes, strict=True)]
    return Around(max(map(add, rounds, updates)) - longest, longest - max(spans))


class _Lane:
    """The data-parallel lane of one rank."""

    def __init__(
        self,
        run: Run,
        edges: tuple[Edge, ...],
        exchange: Exchange,
        size: tuple[int, ...],
        layers: tuple[int, ...],
    ) -> None:
        self._run, self.edges, self.exchange = run, edges, exchange
        whole = sum([size[edge.chunk] for edge in edges])
        self._held = [(size[edge.chunk] / whole, layers[edge.chunk]) for edge in edges]

    def late_s(self) -> list[float]:
        """Return how much later the first forward of every chunk may start than it could."""
        both = list(zip(self._held, self.edges, strict=True))
        begun = [Held(*held, edge.first_s, edge.begun_s) for held, edge in both]
        floors = gathered_s(self._run, self.exchange.gather_s, begun)
        return [floor - edge.first_s for floor, edge in zip(floors, self.edges, strict=True)]

    def reduced_s(self) -> float:
        """Return when all gradients are reduced, to the end of all passes."""
        both = zip(self._held, self.edges, strict=True)
        done = [Held(*held, edge.last_s, edge.done_s) for held, edge in both]
        done.sort(key=_END)
        return reduced_s(self._run, self.exchange.reduce_s, done)


_END = attrgetter("end_s")


def chunk_sizes(run: Run) -> tuple[int, ...]:
    """Return the parameters of every chunk on one rank, as far as ranks hold several."""
    layout = run.layout
    if layout.virtual_stages == 1 and layout.schedule != "dualpipe":
        return (1,) * layout.pp
    alone = msgspec.structs.replace(layout, pp=layout.chunks, virtual_stages=1, schedule="1f1b")
    return tuple(held.total for held in rank_parameters(alone, run.model))


def gathers_overlap(run: Run) -> bool:
    """Whether parameters are gathered while the first passes run."""
    return run.layout.overlap_parameters and run.software.overlap_exchange


def reductions_overlap(run: Run) -> bool:
    """Whether gradients are reduced while the last passes run."""
    return run.layout.overlap_gradients and run.software.overlap_exchange


def edge_bucket(run: Run, usual: float) -> float:
    """Return the share of the bucket that nothing hides: the first gathered, the last reduced."""
    return max(usual, run.constants.bucket_exposed)


def gathered_s(run: Run, gather_s: float, chunks: list[Held]) -> list[float]:
    """Return how early the first forward of every chunk may start, in the order of their use.

    A layer waits for its own bucket only, so the first and the last layer decide.
    """
    if not gather_s or not gathers_overlap(run):
        return [gather_s] * len(chunks)
    edge = edge_bucket(run, chunks[0].bucket)
    rest = (1 - edge) / (1 - chunks[0].bucket) if chunks[0].bucket < 1 else 0.0
    floors, there = [], 0.0
    for chunk in chunks:
        usual = chunk.bucket * rest
        first = there + (edge if chunk is chunks[0] else usual) * gather_s
        there = first + (chunk.buckets - 1) * usual * gather_s
        window = chunk.end_s - chunk.start_s
        floors.append(max(first, there - window * (1 - 1 / chunk.buckets)))
    floors[0] += run.constants.sm_share * max(0.0, gather_s - floors[0])
    return floors


def reduced_s(run: Run, reduce_s: float, chunks: list[Held]) -> float:
    """Return when the gradients of a rank's chunks, in the order they are complete, are reduced.

    What hides slows down the compute beside it, which shows as a later end.
    """
    done = chunks[-1].end_s
    if not reduce_s or not reductions_overlap(run):
        return done + reduce_s
    edge = edge_bucket(run, chunks[-1].bucket)
    rest = (1 - edge) / (1 - chunks[-1].bucket) if chunks[-1].bucket < 1 else 0.0
    free = chunks[0].start_s
    for chunk in chunks:
        usual = chunk.bucket * rest * reduce_s
        count = chunk.buckets - (chunk is chunks[-1])
        window = chunk.end_s - chunk.start_s
        first = chunk.end_s - window * (1 - 1 / chunk.buckets)
        last = chunk.end_s - window * (1 - count / chunk.buckets)
        if count:
            free = max(max(free, first) + count * usual, last + usual)
    free = max(free, done) + edge * reduce_s
    return free + run.constants.sm_share * max(0.0, reduce_s - (free - done))
