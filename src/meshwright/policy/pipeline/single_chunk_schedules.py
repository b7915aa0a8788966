"""Schedules with one chunk per rank: GPipe, 1F1B and the zero-bubble schedules H1 and H2.

Each function writes the actions of one rank, counted from the embedding.
"""

from meshwright.policy.pipeline.rank_writer import ScheduleParams, write_one_f_one_b
from meshwright.policy.pipeline.schedule import PipelineAction, PipelineOp


def build_gpipe_actions(rank: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    A limit on what is in flight runs the step in rounds of that many microbatches.
    """
    size = asked.max_in_flight or asked.microbatches
    lane: list[PipelineAction] = []
    for first in range(0, asked.microbatches, size):
        some = range(first, min(first + size, asked.microbatches))
        lane += [PipelineAction("F", rank, microbatch) for microbatch in some]
        lane += [PipelineAction("B", rank, microbatch) for microbatch in some]
    return tuple(lane)


def build_1f1b_actions(rank: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """Backward as soon as it can be (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503)."""
    warm_up = asked.ranks - 1 - rank
    if asked.max_in_flight is not None:
        warm_up = min(warm_up, asked.max_in_flight - 1)
    return write_one_f_one_b(_every("F", rank, asked), _every("B", rank, asked), warm_up)


def build_zb_h1_actions(rank: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """1F1B whose weight backwards wait until the rank holds p microbatches.

    Qi et al. 2024 (arXiv 2401.10241), figure 3, top: the last rank has the shallowest warm-up and
    so can put off the most weight work, which then fills the bubble at the end.
    """
    return _zero_bubble(rank, asked, warm_up=asked.ranks - 1 - rank, delay=rank)


def build_zb_h2_actions(rank: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """Twice the warm-up of 1F1B, so that no rank waits for its first backward.

    Qi et al. 2024 (arXiv 2401.10241), figure 3, bottom.
    """
    return _zero_bubble(rank, asked, warm_up=2 * (asked.ranks - 1 - rank), delay=2 * rank)


def _zero_bubble(
    rank: int, asked: ScheduleParams, *, warm_up: int, delay: int
) -> tuple[PipelineAction, ...]:
    if asked.max_in_flight is not None:
        warm_up = min(warm_up, asked.max_in_flight - 1)
        delay = min(delay, asked.max_in_flight - 1 - warm_up)
    forwards, inputs, weights = (_every(op, rank, asked) for op in _SPLIT)
    return write_one_f_one_b(forwards, inputs, warm_up, weights, delay)


_SPLIT: tuple[PipelineOp, ...] = ("F", "I", "W")


def _every(op: PipelineOp, chunk: int, asked: ScheduleParams) -> list[PipelineAction]:
    return [PipelineAction(op, chunk, microbatch) for microbatch in range(asked.microbatches)]
