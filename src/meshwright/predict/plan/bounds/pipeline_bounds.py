"""Lower bounds on pipeline rank time: seconds of fill, passes and drain."""

from itertools import accumulate
from typing import NamedTuple

from meshwright.predict.plan.space.layer_shapes import LayerShape
from meshwright.predict.plan.space.pipeline_schedules import (
    OVERLAPPED_SCHEDULES,
    ChunkTimes,
    ScheduleOption,
)
from meshwright.predict.step.pipeline_bubble import NO_BARRIER_SCHEDULES


class RankBound(NamedTuple):
    """The least a rank takes: until it starts, its passes, and what others do after it."""

    fill_s: float
    busy_s: float
    drain_s: float


def bound_ranks(
    shape: LayerShape,
    pipe: ScheduleOption,
    chunks: ChunkTimes,
    more: list[float] | None,
    flying: tuple[int, ...],
) -> list[RankBound]:
    """Return the floors of every rank.

    `more` is what every chunk's backward takes longer, `flying` how many passes of one chunk each
    rank holds activations of at the most.
    """
    layout, count = shape.layout, shape.microbatches
    forward, backward = chunks.forward_s, chunks.backward_s
    if more is not None:
        backward = [a + b for a, b in zip(backward, more, strict=True)]
    if layout.pp == 1:
        return [RankBound(0.0, count * (forward[0] + backward[0]), 0.0)]
    passes = [f + b for f, b in zip(forward, backward, strict=True)]
    held = pipe.list_rank_chunks(layout.pp)
    if pipe.schedule in NO_BARRIER_SCHEDULES or pipe.schedule in OVERLAPPED_SCHEDULES:
        times = count / 2 if pipe.schedule == "dualpipe" else count
        busy = [times * sum([passes[chunk] for chunk in own]) for own in held]
        if pipe.schedule in OVERLAPPED_SCHEDULES and not layout.overlap_ep:
            hide = shape.run.constants.expert_overlap_share
            for rank, own in enumerate(held):
                exchange = times * sum([chunks.expert_comm_s[chunk] for chunk in own])
                busy[rank] -= min(exchange, hide * (busy[rank] - exchange))
            passes = [a - b for a, b in zip(passes, chunks.expert_comm_s, strict=True)]
        idle = _idle_s(shape, chunks, passes, held, flying)
        return [RankBound(wait, one, 0.0) for one, wait in zip(busy, idle, strict=True)]
    hop, found = shape.hop_s, []
    before = after = 0.0
    for rank, own in enumerate(held):
        busy_s = passes[own[0]] if len(own) == 1 else sum([passes[chunk] for chunk in own])
        found.append(RankBound(before, count * busy_s, after))
        before += forward[rank] + hop
        after += backward[rank] + hop
    return found


def _idle_s(
    shape: LayerShape,
    chunks: ChunkTimes,
    passes: list[float],
    held: list[list[int]],
    flying: tuple[int, ...],
) -> list[float]:
    """Return how long each rank idles at the least before its first backward.

    From its first forward the microbatch goes on to the end of the model and back; meanwhile the
    rank has nothing to do but forwards, and no more of them than it holds activations of.
    """
    forward, hop = chunks.forward_s, shape.hop_s
    inputs = [
        one - ahead - weights
        for one, ahead, weights in zip(passes, forward, chunks.wgrad_s, strict=True)
    ]
    ahead, back = [*accumulate(forward, initial=0.0)], [*accumulate(inputs, initial=0.0)]
    found, last = [], len(forward) - 1
    for own, most in zip(held, flying, strict=True):
        first, final = own[0], own[-1]
        trip = ahead[-1] - ahead[first] + back[-1] - back[final + 1]
        trip += hop * (last - first + last - final)
        found.append(max(0.0, trip - most * max([forward[chunk] for chunk in own])))
    return found
