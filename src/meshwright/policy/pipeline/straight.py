"""Schedules with one chunk per rank: GPipe, 1F1B and the zero-bubble schedules H1 and H2.

Each function writes the actions of one rank, counted from the embedding.
"""

from meshwright.policy.pipeline.lane import Asked, alternate
from meshwright.policy.pipeline.schedule import Action, Op


def gpipe(rank: int, asked: Asked) -> tuple[Action, ...]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    A limit on what is in flight runs the step in rounds of that many microbatches.
    """
    size = asked.max_in_flight or asked.microbatches
    lane: list[Action] = []
    for first in range(0, asked.microbatches, size):
        some = range(first, min(first + size, asked.microbatches))
        lane += [Action("F", rank, microbatch) for microbatch in some]
        lane += [Action("B", rank, microbatch) for microbatch in some]
    return tuple(lane)


def one_f_one_b(rank: int, asked: Asked) -> tuple[Action, ...]:
    """Backward as soon as it can be (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503)."""
    warm_up = asked.p - 1 - rank
    if asked.max_in_flight is not None:
        warm_up = min(warm_up, asked.max_in_flight - 1)
    return alternate(_every("F", rank, asked), _every("B", rank, asked), warm_up)


def zb_h1(rank: int, asked: Asked) -> tuple[Action, ...]:
    """1F1B whose weight backwards wait until the rank holds p microbatches.

    Qi et al. 2024 (arXiv 2401.10241), figure 3, top: the last rank has the shallowest warm-up and
    so can put off the most weight work, which then fills the bubble at the end.
    """
    return _zero_bubble(rank, asked, warm_up=asked.p - 1 - rank, delay=rank)


def zb_h2(rank: int, asked: Asked) -> tuple[Action, ...]:
    """Twice the warm-up of 1F1B, so that no rank waits for its first backward.

    Qi et al. 2024 (arXiv 2401.10241), figure 3, bottom.
    """
    return _zero_bubble(rank, asked, warm_up=2 * (asked.p - 1 - rank), delay=2 * rank)


def _zero_bubble(rank: int, asked: Asked, *, warm_up: int, delay: int) -> tuple[Action, ...]:
    if asked.max_in_flight is not None:
        warm_up = min(warm_up, asked.max_in_flight - 1)
        delay = min(delay, asked.max_in_flight - 1 - warm_up)
    forwards, inputs, weights = (_every(op, rank, asked) for op in _SPLIT)
    return alternate(forwards, inputs, warm_up, weights, delay)


_SPLIT: tuple[Op, ...] = ("F", "I", "W")


def _every(op: Op, chunk: int, asked: Asked) -> list[Action]:
    return [Action(op, chunk, microbatch) for microbatch in range(asked.microbatches)]
