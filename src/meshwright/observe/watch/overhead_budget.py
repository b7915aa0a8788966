"""When the next capture may be taken, so that watching stays below its share of the time.

A capture costs what starting, stopping and writing it takes, and what its steps take longer. The
agents count that; here it is held against the time that has passed.
"""

import math
from typing import NamedTuple

FIRST_COST_S = 0.25
"""What a capture is taken to cost before one was measured: the first also sets the profiler up, and
on a GPU the driver's part of it (30 to 60 ms for small models on an H200). The first capture waits
until that much is paid for."""
MAX_CAPTURE_INTERVAL = 2**30


class WatchOverhead(NamedTuple):
    """What watching has cost so far, of the rank that it cost most."""

    elapsed_s: float
    """Since its first step."""
    overhead_s: float
    cost_s: float
    """What one capture is expected to cost."""
    step_s: float

    @property
    def overhead_share(self) -> float:
        """The overhead that was counted, as a part of the time."""
        return self.overhead_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


def is_affordable(spending: WatchOverhead, share: float) -> bool:
    """Tell whether a capture now would leave all costs so far within their share of the time."""
    return spending.overhead_s + spending.cost_s <= share * spending.elapsed_s


def may_overdraw(spending: WatchOverhead, share: float) -> bool:
    """Tell whether a triggered capture may go ahead of its share: debts end at one capture."""
    return spending.overhead_s <= share * spending.elapsed_s + spending.cost_s


def choose_capture_interval(spending: WatchOverhead, share: float) -> int:
    """Every how many steps a capture can be paid for, as a power of two.

    Powers of two so that watchers of several nodes, who do not talk to each other, mostly choose
    the same steps: those are multiples of one stride or of another.
    """
    if spending.step_s <= 0 or share <= 0:
        return MAX_CAPTURE_INTERVAL
    steps = spending.cost_s / (share * spending.step_s)
    return int(min(MAX_CAPTURE_INTERVAL, 2 ** max(0, math.ceil(math.log2(max(steps, 1.0))))))


def find_next_capture_step(step: int, every: int) -> int:
    """Return the first multiple of a stride that is not before a step."""
    return -(-step // every) * every


def estimate_capture_cost_s(costs_s: list[float], first_s: float = FIRST_COST_S) -> float:
    """What the next capture costs, by those before; they count without the first."""
    if not costs_s:
        return first_s
    later = sorted(costs_s[1:][-8:]) or costs_s
    return later[-1] if len(later) < 3 else later[(3 * len(later)) // 4]
