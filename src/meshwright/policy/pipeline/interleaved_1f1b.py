"""The interleaved schedule: several chunks per rank, microbatches in groups, as Megatron runs it.

Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, in the form of Megatron-Core: a group of
microbatches passes a rank's first chunk, then its second, and so on, before the next group comes.
"""

from meshwright.policy.pipeline.rank_writer import ScheduleParams, write_one_f_one_b
from meshwright.policy.pipeline.schedule import PipelineAction


def get_default_group_size(p: int, microbatches: int) -> int:
    """Return the smallest group that leaves no short remainder.

    Megatron-Core takes groups of p where p divides the microbatches; it refuses a last group
    shorter than p, because the pipeline would run dry between chunks.
    """
    if microbatches <= p:
        return microbatches
    sizes = range(p, microbatches + 1)
    return next(g for g in sizes if microbatches % g == 0 or microbatches % g >= p)


def count_min_in_flight(asked: ScheduleParams) -> int:
    """Return what a rank must hold before the first microbatch can turn around."""
    return (asked.virtual_stages - 1) * asked.microbatch_group_size + 1


def build_interleaved_actions(rank: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """Write one rank's actions."""
    p, last = asked.ranks, asked.virtual_stages - 1
    table = [
        (turn, microbatch)
        for first in range(0, asked.microbatches, asked.microbatch_group_size)
        for turn in range(asked.virtual_stages)
        for microbatch in range(first, min(first + asked.microbatch_group_size, asked.microbatches))
    ]
    forwards = [PipelineAction("F", turn * p + rank, microbatch) for turn, microbatch in table]
    backwards = [
        PipelineAction("B", (last - turn) * p + rank, microbatch) for turn, microbatch in table
    ]
    warm_up = 2 * (p - 1 - rank) + last * asked.microbatch_group_size
    if asked.max_in_flight is not None:
        warm_up = min(warm_up, asked.max_in_flight - 1)
    return write_one_f_one_b(forwards, backwards, warm_up)
