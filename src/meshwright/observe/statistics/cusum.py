"""Whether a row of values has moved for good: sums of what exceeds the usual (CUSUM, Page 1954).

Values are logarithms of step times. A sum tuned to a rise of δ adds up how far each value lies over
the usual one, less δ/2, and never falls below nought; a rise lets it grow without end, noise does
not. How far noise drives it is known (Siegmund 1985, Sequential Analysis): a walk with steps of
spread σ that is held back by k at each crosses h once in

    (exp(2 k g / σ²) - 1 - 2 k g / σ²) σ² / (2 k²)    with g = h + 1.166 σ

values on average. Turned around, the rate of false alarms that is allowed gives every limit; none
is chosen. Noise in step times is neither normal nor independent, so σ is the spread of sums, not of
single values: groups of 1, 2, 4, … values are averaged, and the largest of spread times √group
counts; or what the correlation of neighbours says, where that is more, as few values make few
groups. Single values count up to `CLIP` spreads, so that an outlier is one value and no more.
"""

import math
from typing import NamedTuple

import numpy as np

from meshwright.observe.statistics.change_points import Floats

MIN_RISE = 0.03
"""A smaller rise is not told: clocks and neighbours move steps by as much all the time."""
TUNED_RISES = (MIN_RISE, 0.10, 0.30)
"""Rises that a sum of its own is the quickest to see."""
FALSE_ALARM_RUN_LENGTH = 1e6
"""Values between two false alarms, on average, were noise as assumed."""
NUM_NEWEST, NUM_EXCEPTIONS = 8, 2
"""The newest values have to be over the usual by `MIN_RISE`, too, all but two of them: a few long
steps after a checkpoint are no change, however long."""
CLIP = 4.0
MIN_GROUPS = 12
"""Averages that a spread is told from."""
LEVEL_MARGIN_ERRORS = 2.0
"""Standard errors of the usual value that do not count as a rise."""
_FINEST = 2e-4
"""Spread that is assumed at least: clocks tell no less."""


class BaselineStats(NamedTuple):
    """What values are when nothing moves."""

    level: float
    """The median."""
    mean_offset: float
    """The mean over the median: outliers are longer, never shorter."""
    clip: float
    """As far from the median a value counts."""
    increment_std: float
    """Spread of sums: what one value adds to it."""
    num_values: int
    """Values that tell this."""

    @property
    def standard_error(self) -> float:
        """How far the level may be off: one standard error."""
        return self.increment_std / math.sqrt(self.num_values)


def estimate_baseline(values: Floats) -> BaselineStats:
    """Estimate the usual value and its spreads."""
    level = float(np.median(values))
    off = values - level
    single = max(_FINEST, 1.4826 * float(np.median(np.abs(off))))
    clip = max(CLIP * single, 2 * MIN_RISE)
    off = np.clip(off, -clip, clip)
    lean = float(off.mean())
    off -= lean
    spread, size = max(single, _by_neighbours(off)), 1
    while values.size // size >= MIN_GROUPS:
        whole = off[off.size % size :].reshape(-1, size).mean(axis=1)
        spread = max(spread, math.sqrt(size) * float(whole.std()))
        size *= 2
    return BaselineStats(level, lean, clip, spread, values.size)


def _by_neighbours(off: Floats) -> float:
    """Return the spread of sums where each value remembers only the one before: an AR(1) process.

    Few values show too little of that memory, by (1 + 3 r) / n (Kendall 1954).
    """
    spread = float(off.std())
    if spread <= 0:
        return 0.0
    r = float((off[1:] * off[:-1]).mean()) / spread**2
    r = min(0.99, max(0.0, r + (1 + 3 * r) / off.size))
    return spread * math.sqrt((1 + r) / (1 - r))


def compute_cusum_limit(
    slack: float, spread: float, quiet: float = FALSE_ALARM_RUN_LENGTH
) -> float:
    """Return how high a sum may go that noise of this spread drives, held back by `slack`."""
    pull = 2 * slack / spread
    # a = pull g solves exp(a) - 1 - a = quiet pull² / 2: Newton's way, from above.
    wanted = quiet * pull**2 / 2
    a = math.log1p(wanted) + 2.0
    for _ in range(30):
        a -= (math.expm1(a) - a - wanted) / math.expm1(a)
    return max(0.0, a / pull - 1.166) * spread


class LevelShift(NamedTuple):
    """A row of values that left its level."""

    is_up: bool
    num_values_ago: int
    """Values since it began, the newest among them."""


class CusumDetector:
    """Sums of what exceeds the usual, up and down, one for each rise that is looked for."""

    def __init__(self, baseline: BaselineStats) -> None:
        self._newest: list[float] = []
        self._sums = [[0.0, 0.0] for _ in TUNED_RISES]
        self._since = [[0, 0] for _ in TUNED_RISES]
        self.update_baseline(baseline)

    def update_baseline(self, usual: BaselineStats) -> None:
        """Take a better estimate of what is usual."""
        self.baseline = usual
        self._slacks = [math.log1p(rise) / 2 for rise in TUNED_RISES]
        self._limits = [compute_cusum_limit(slack, usual.increment_std) for slack in self._slacks]

    def add(self, value: float) -> LevelShift | None:
        """Add a value; tell where it makes sure that the level moved."""
        self._newest = [*self._newest[1 - NUM_NEWEST :], value]
        usual = self.baseline
        off = min(usual.clip, max(-usual.clip, value - usual.level)) - usual.mean_offset
        margin = LEVEL_MARGIN_ERRORS * usual.standard_error
        found = None
        for number, (slack, top) in enumerate(zip(self._slacks, self._limits, strict=True)):
            for way, sign in enumerate((1, -1)):
                held = self._sums[number][way] + sign * off - slack - margin
                self._sums[number][way] = max(0.0, held)
                self._since[number][way] = self._since[number][way] + 1 if held > 0 else 0
                if held > top and self._all_moved(sign):
                    ago = self._since[number][way]
                    if found is None or ago < found.num_values_ago:
                        found = LevelShift(sign > 0, ago)
        return found

    @property
    def alarm_fraction(self) -> float:
        """How near the highest sum is to its limit, 0 to 1: whether the level may have moved."""
        pairs = zip(self._sums, self._limits, strict=True)
        return max(max(sums) / top if top else float(max(sums) > 0) for sums, top in pairs)

    def _all_moved(self, sign: int) -> bool:
        if len(self._newest) < NUM_NEWEST:
            return False
        nearest = sorted(sign * (value - self.baseline.level) for value in self._newest)
        return nearest[NUM_EXCEPTIONS] > math.log1p(MIN_RISE)
