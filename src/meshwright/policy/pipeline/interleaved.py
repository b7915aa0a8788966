"""The interleaved schedule: several chunks per rank, microbatches in groups, as Megatron runs it.

Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, in the form of Megatron-Core: a group of
microbatches passes a rank's first chunk, then its second, and so on, before the next group comes.
"""

from meshwright.policy.pipeline.lane import Asked, alternate
from meshwright.policy.pipeline.schedule import Action


def default_group(p: int, microbatches: int) -> int:
    """Return the smallest group that leaves no short remainder.

    Megatron-Core takes groups of p where p divides the microbatches; it refuses a last group
    shorter than p, because the pipeline would run dry between chunks.
    """
    if microbatches <= p:
        return microbatches
    sizes = range(p, microbatches + 1)
    return next(g for g in sizes if microbatches % g == 0 or microbatches % g >= p)


def least_interleaved(asked: Asked) -> int:
    """Return what a rank must hold before the first microbatch can turn around."""
    return (asked.virtual_stages - 1) * asked.group + 1


def interleaved(rank: int, asked: Asked) -> tuple[Action, ...]:
    """Write one rank's actions."""
    p, last = asked.p, asked.virtual_stages - 1
    table = [
        (turn, microbatch)
        for first in range(0, asked.microbatches, asked.group)
        for turn in range(asked.virtual_stages)
        for microbatch in range(first, min(first + asked.group, asked.microbatches))
    ]
    forwards = [Action("F", turn * p + rank, microbatch) for turn, microbatch in table]
    backwards = [Action("B", (last - turn) * p + rank, microbatch) for turn, microbatch in table]
    warm_up = 2 * (p - 1 - rank) + last * asked.group
    if asked.max_in_flight is not None:
        warm_up = min(warm_up, asked.max_in_flight - 1)
    return alternate(forwards, backwards, warm_up)
