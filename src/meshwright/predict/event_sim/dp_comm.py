"""The data-parallel lane of every rank: parameters gathered ahead, gradients reduced behind.

Buckets are layers. Parameters are gathered in the order of their use from the start of the step,
and a first forward starts when none of its layers would have to wait. Gradients of a chunk are
complete layer by layer while its last backward runs, and are reduced in that order. What the lane
still has to do when a rank's passes are over is exposed.
"""

from typing import NamedTuple

import numpy as np

from meshwright.predict.event_sim.action_costs import PASSES, ActionColumns
from meshwright.predict.event_sim.noise import Floats
from meshwright.predict.step.grad_buckets import (
    DPCommTime,
    exposed_bucket_share,
    list_chunk_parameters,
    overlaps_grad_reduce,
    overlaps_param_gather,
)
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import list_chunks


class BucketTransfer(NamedTuple):
    """One collective of a data-parallel lane."""

    rank: int
    layer: int
    is_gather: bool
    """Parameters are gathered, or gradients are reduced."""
    share: float
    """Of all that its rank gathers or reduces."""
    start_s: float
    end_s: float


class RankChunkActions(NamedTuple):
    """A chunk of a rank, and where its passes stand among all actions."""

    first_layer: int
    layers: int
    share: float
    """Of the rank's parameters."""
    first_forward: int
    """Its first forward."""
    last_backward: int
    """The backward that completes its gradients."""


def list_rank_chunks(run: TrainingRun, actions: ActionColumns) -> list[list[RankChunkActions]]:
    """Return the chunks of every rank, in the order their parameters are needed."""
    size = list_chunk_parameters(run)
    found: list[list[RankChunkActions]] = [[] for _ in range(run.layout.pp)]
    ends = np.isin(actions.op, [PASSES.index("B"), PASSES.index("W")])
    for chunk in list_chunks(run.layout, run.model.layers):
        own = (actions.rank == chunk.rank) & (actions.chunk == chunk.position)
        if own.any():  # too few microbatches may leave one end of a DualPipe out
            first, last = np.flatnonzero(own)[0], np.flatnonzero(own & ends)[-1]
            layers = chunk.last - chunk.first
            part = RankChunkActions(
                chunk.first, layers, size[chunk.position], int(first), int(last)
            )
            found[chunk.rank].append(part)
    return [_in_order(parts) for parts in found]


def _in_order(parts: list[RankChunkActions]) -> list[RankChunkActions]:
    whole = sum(part.share for part in parts)
    return [
        part._replace(share=part.share / whole)
        for part in sorted(parts, key=lambda part: part.first_forward)
    ]


def simulate_param_gathers(
    run: TrainingRun,
    parts: list[list[RankChunkActions]],
    exchanges: list[DPCommTime],
    lengths_s: Floats,
) -> tuple[list[BucketTransfer], dict[int, float]]:
    """Return the gathers of all ranks, and when first forwards may start, by place."""
    buckets: list[BucketTransfer] = []
    floors: dict[int, float] = {}
    for rank, (own, exchange) in enumerate(zip(parts, exchanges, strict=True)):
        gathers = _gather_lane(run, rank, own, exchange.gather_s)
        floors |= _floors(run, own, gathers, lengths_s)
        buckets += gathers
    return buckets, floors


def simulate_grad_reductions(
    run: TrainingRun,
    parts: list[list[RankChunkActions]],
    exchanges: list[DPCommTime],
    times_s: tuple[Floats, Floats],
) -> list[BucketTransfer]:
    """Return the reductions of all ranks, given when passes start and end, by place."""
    return [
        bucket
        for rank, (own, exchange) in enumerate(zip(parts, exchanges, strict=True))
        for bucket in _reduce_lane(run, rank, own, exchange.reduce_s, times_s)
    ]


def _gather_lane(
    run: TrainingRun, rank: int, parts: list[RankChunkActions], gather_s: float
) -> list[BucketTransfer]:
    """Return a rank's gathers: one after the other from the start of the step."""
    if not gather_s:
        return []
    sizes = _sizes(run, parts)
    ends = np.cumsum(sizes) * gather_s
    layers = (part.first_layer + index for part in parts for index in range(max(1, part.layers)))
    return [
        BucketTransfer(rank, layer, True, size, float(end) - size * gather_s, float(end))
        for layer, size, end in zip(layers, sizes, ends, strict=True)
    ]


def _floors(
    run: TrainingRun,
    parts: list[RankChunkActions],
    gathers: list[BucketTransfer],
    lengths_s: Floats,
) -> dict[int, float]:
    """Return when the first forward of every chunk may start, by place."""
    if not gathers:
        return {}
    there = gathers[-1].end_s
    if not overlaps_param_gather(run):
        return {parts[0].first_forward: there}
    floors: dict[int, float] = {}
    ends = iter(gathers)
    for part in parts:
        window = float(lengths_s[part.first_forward])
        count = max(1, part.layers)
        waits = [next(ends).end_s - window * index / count for index in range(count)]
        floors[part.first_forward] = max(waits)
    # What hides slows down the compute beside it, which shows as a later start.
    first = floors[parts[0].first_forward]
    floors[parts[0].first_forward] = first + run.constants.comm_sm_share * max(0.0, there - first)
    return floors


def _reduce_lane(
    run: TrainingRun,
    rank: int,
    parts: list[RankChunkActions],
    reduce_s: float,
    times_s: tuple[Floats, Floats],
) -> list[BucketTransfer]:
    """Return a rank's reductions, given when all passes start and end."""
    if not reduce_s:
        return []
    parts = sorted(parts, key=lambda part: part.last_backward)
    starts, ends = ([float(one[part.last_backward]) for part in parts] for one in times_s)
    sizes = iter(_sizes(run, parts[::-1])[::-1])
    buckets: list[BucketTransfer] = []
    free = 0.0
    for part, start, end in zip(parts, starts, ends, strict=True):
        count, window = max(1, part.layers), end - start
        for index in range(count):
            ready = end - window * (1 - (index + 1) / count)
            begin = max(free, ready if overlaps_grad_reduce(run) else ends[-1])
            size = next(sizes)
            free = begin + size * reduce_s
            layer = part.first_layer + count - 1 - index
            buckets.append(BucketTransfer(rank, layer, False, size, begin, free))
    if overlaps_grad_reduce(run):
        # What hides slows down the compute beside it, which shows as a later end.
        late = run.constants.comm_sm_share * max(0.0, reduce_s - (free - ends[-1]))
        buckets[-1] = buckets[-1]._replace(end_s=free + late)
    return buckets


def _sizes(run: TrainingRun, parts: list[RankChunkActions]) -> list[float]:
    """Return the share of every bucket, layer by layer; the first is as large as never hides."""
    usual = [part.share / max(1, part.layers) for part in parts for _ in range(max(1, part.layers))]
    if len(usual) == 1:
        return usual
    first = exposed_bucket_share(run, usual[0])
    return [first, *(size * (1 - first) / (1 - usual[0]) for size in usual[1:])]
