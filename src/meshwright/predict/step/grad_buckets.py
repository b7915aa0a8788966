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

from meshwright.predict.step.measured_costs import collective_time_s
from meshwright.predict.step.pipeline_bubble import (
    ChunkEdgeTimes,
    PipelineBubble,
    first_start_s,
    last_end_s,
    skips_optimizer_barrier,
)
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import RankParameters, count_rank_parameters, split_layers
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT


class DPCommTime(NamedTuple):
    """Seconds one rank's collectives take in a step, hidden or not."""

    reduce_s: float = 0.0
    """Gradients, after they are summed up."""
    gather_s: float = 0.0
    """Updated parameters, before their use."""


def predict_dp_comm(run: TrainingRun, held: RankParameters) -> DPCommTime:
    """Return how long gradients and parameters that a rank trains travel, if nothing hides them."""
    layout = run.layout
    if layout.dp * layout.cp == 1:
        return DPCommTime()
    found = _exchange(run, "dp-cp", float(held.matrices + held.others))
    if held.experts and layout.expert_dp > 1:
        more = _exchange(run, "expert_dp", float(held.experts))
        found = DPCommTime(*map(add, found, more))
    return found


def _exchange(run: TrainingRun, axes: str, parameters: float) -> DPCommTime:
    """Exchange some parameters within the group along some axes."""
    layout = run.layout
    gradients = parameters * BYTES_PER_ELEMENT[layout.gradient_precision]
    reduce_s = gather_s = 0.0
    if layout.shard is not None and axes == "dp-cp" and layout.zero:
        # Copies of the sharded states add up their shards among each other.
        reduce_s = collective_time_s(
            run, "replicate", "all_reduce", gradients / layout.shard_degree
        )
        axes = "shard"
    if layout.zero == 3:
        return DPCommTime(reduce_s)  # the rest travels with every pass
    if layout.zero == 0 or not run.framework.overlap_exchange:
        reduce_s += collective_time_s(run, axes, "all_reduce", gradients)
    else:
        reduce_s += collective_time_s(run, axes, "reduce_scatter", gradients)
    if layout.zero:
        gather_s = collective_time_s(run, axes, "all_gather", parameters * run.element_bytes)
    if run.measured is not None:
        reduce_s += run.measured.bucket_copy.predict_s(gradients)
    return DPCommTime(reduce_s, gather_s)


class RankChunk(NamedTuple):
    """A chunk as the data-parallel lane of its rank sees it."""

    parameter_share: float
    """Of the rank's parameters."""
    layers: int
    start_s: float
    """When its first forward, or its last backward, starts."""
    end_s: float
    """When that pass ends."""

    @property
    def num_buckets(self) -> int:
        """One per layer, and one where a chunk has none."""
        return max(1, self.layers)

    @property
    def bucket_share(self) -> float:
        """The share of one."""
        return self.parameter_share / self.num_buckets


class ExposedDPComm(NamedTuple):
    """What a step adds to its passes."""

    dp_comm_s: float
    """Waiting for parameters and gradients."""
    optimizer_s: float
    """Gradient norm and update, with the transfers to and from host memory around them."""


def predict_exposed_dp_comm(
    run: TrainingRun,
    parameters: tuple[RankParameters, ...],
    updates: tuple[float, ...],
    pipe: PipelineBubble,
) -> ExposedDPComm:
    """Return what a step waits for parameters before its passes, for gradients and for the update.

    `parameters`, those that are trained, and `updates` (seconds) are those of every rank. Who would
    idle anyway waits for nothing.
    """
    exchanges = {held: predict_dp_comm(run, held) for held in set(parameters)}
    if any(map(any, exchanges.values())):
        size, layers = list_chunk_parameters(run), split_layers(run.layout, run.model.layers)
        lanes = [
            _Lane(run, edges, exchanges[held], size, layers)
            for edges, held in zip(pipe.chunk_edges, parameters, strict=True)
        ]
    else:
        lanes = []
    if skips_optimizer_barrier(run):
        return _by_itself(pipe.chunk_edges, lanes, updates)
    before = after = 0.0
    for lane in lanes:
        if lane.exchange.gather_s - first_start_s(lane.edges) > before:
            before = max(before, *lane.late_s())
        if lane.exchange.reduce_s + last_end_s(lane.edges) > after:
            after = max(after, lane.reduced_s())
    return ExposedDPComm(before + after, max(updates))


def _by_itself(
    edges: tuple[tuple[ChunkEdgeTimes, ...], ...], lanes: list["_Lane"], updates: tuple[float, ...]
) -> ExposedDPComm:
    """Return the same where every rank goes round by itself: the longest round is the step."""
    spans = [last_end_s(own) - first_start_s(own) for own in edges]
    longest = max(map(add, spans, updates))
    if not lanes:
        return ExposedDPComm(0.0, longest - max(spans))
    late = [lane.late_s() for lane in lanes]
    # Later chunks may wait longer than first ones, and then hold up all.
    more = max(map(max, late)) - max(own[0] for own in late)
    rounds = [own[0] + more + lane.reduced_s() for own, lane in zip(late, lanes, strict=True)]
    return ExposedDPComm(max(map(add, rounds, updates)) - longest, longest - max(spans))


class _Lane:
    """The data-parallel lane of one rank."""

    def __init__(
        self,
        run: TrainingRun,
        edges: tuple[ChunkEdgeTimes, ...],
        exchange: DPCommTime,
        size: tuple[int, ...],
        layers: tuple[int, ...],
    ) -> None:
        self._run, self.edges, self.exchange = run, edges, exchange
        whole = sum([size[edge.chunk] for edge in edges])
        self._held = [(size[edge.chunk] / whole, layers[edge.chunk]) for edge in edges]

    def late_s(self) -> list[float]:
        """Return how much later the first forward of every chunk may start than it could."""
        both = list(zip(self._held, self.edges, strict=True))
        begun = [
            RankChunk(*held, edge.first_forward_start_s, edge.first_forward_end_s)
            for held, edge in both
        ]
        floors = param_gather_delay_s(self._run, self.exchange.gather_s, begun)
        return [
            floor - edge.first_forward_start_s
            for floor, edge in zip(floors, self.edges, strict=True)
        ]

    def reduced_s(self) -> float:
        """Return when all gradients are reduced, to the end of all passes."""
        both = zip(self._held, self.edges, strict=True)
        done = [
            RankChunk(*held, edge.last_backward_start_s, edge.last_backward_end_s)
            for held, edge in both
        ]
        done.sort(key=_END)
        return grad_reduce_end_s(self._run, self.exchange.reduce_s, done)


_END = attrgetter("end_s")


def list_chunk_parameters(run: TrainingRun) -> tuple[int, ...]:
    """Return the parameters of every chunk on one rank, as far as ranks hold several."""
    layout = run.layout
    if layout.virtual_stages == 1 and layout.schedule != "dualpipe":
        return (1,) * layout.pp
    alone = msgspec.structs.replace(layout, pp=layout.chunks, virtual_stages=1, schedule="1f1b")
    return tuple(held.total for held in count_rank_parameters(alone, run.model))


def overlaps_param_gather(run: TrainingRun) -> bool:
    """Whether parameters are gathered while the first passes run."""
    return run.layout.overlap_parameters and run.framework.overlap_exchange


def overlaps_grad_reduce(run: TrainingRun) -> bool:
    """Whether gradients are reduced while the last passes run."""
    return run.layout.overlap_gradients and run.framework.overlap_exchange


def exposed_bucket_share(run: TrainingRun, usual: float) -> float:
    """Return the share of the bucket that nothing hides: the first gathered, the last reduced."""
    return max(usual, run.constants.exposed_bucket_share)


def param_gather_delay_s(run: TrainingRun, gather_s: float, chunks: list[RankChunk]) -> list[float]:
    """Return how early the first forward of every chunk may start, in the order of their use.

    A layer waits for its own bucket only, so the first and the last layer decide.
    """
    if not gather_s or not overlaps_param_gather(run):
        return [gather_s] * len(chunks)
    edge = exposed_bucket_share(run, chunks[0].bucket_share)
    rest = (1 - edge) / (1 - chunks[0].bucket_share) if chunks[0].bucket_share < 1 else 0.0
    floors, there = [], 0.0
    for chunk in chunks:
        usual = chunk.bucket_share * rest
        first = there + (edge if chunk is chunks[0] else usual) * gather_s
        there = first + (chunk.num_buckets - 1) * usual * gather_s
        window = chunk.end_s - chunk.start_s
        floors.append(max(first, there - window * (1 - 1 / chunk.num_buckets)))
    floors[0] += run.constants.comm_sm_share * max(0.0, gather_s - floors[0])
    return floors


def grad_reduce_end_s(run: TrainingRun, reduce_s: float, chunks: list[RankChunk]) -> float:
    """Return when the gradients of a rank's chunks, in the order they are complete, are reduced.

    What hides slows down the compute beside it, which shows as a later end.
    """
    done = chunks[-1].end_s
    if not reduce_s or not overlaps_grad_reduce(run):
        return done + reduce_s
    edge = exposed_bucket_share(run, chunks[-1].bucket_share)
    rest = (1 - edge) / (1 - chunks[-1].bucket_share) if chunks[-1].bucket_share < 1 else 0.0
    free = chunks[0].start_s
    for chunk in chunks:
        usual = chunk.bucket_share * rest * reduce_s
        count = chunk.num_buckets - (chunk is chunks[-1])
        window = chunk.end_s - chunk.start_s
        first = chunk.end_s - window * (1 - 1 / chunk.num_buckets)
        last = chunk.end_s - window * (1 - count / chunk.num_buckets)
        if count:
            free = max(max(free, first) + count * usual, last + usual)
    free = max(free, done) + edge * reduce_s
    return free + run.constants.comm_sm_share * max(0.0, reduce_s - (free - done))
