"""Which source each sequence of a blend comes from, in exact proportions, without a table.

Weights become whole quotas of a period; within it, the k-th sequence of a source with quota q
stands at its ideal place (k + ½)·period/q (the order of Webster and Sainte-Laguë), so every stretch
of the row is as close to the weights as can be, and the row repeats. Where sequence n comes from,
and how many of the same source came before, is looked up in constant time.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.run.train.data.corpus.corpus import Ints

MAX_PERIOD = 1 << 16
"""Weights that need no longer period than this are met exactly, others to one part in it."""


class BlendSlice(NamedTuple):
    """For a stretch of a blend."""

    source: Ints
    """Number of the source of each sequence."""
    source_index: Ints
    """How many sequences of the same source came before, from the start of the run."""


class Blend:
    """The endless row of sources."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.quotas: Ints = np.array(compute_integer_quotas(weights), np.int64)
        self.period = int(self.quotas.sum())
        source = np.repeat(np.arange(len(weights)), self.quotas)
        first = np.repeat(np.cumsum(self.quotas) - self.quotas, self.quotas)
        before = np.arange(self.period) - first
        ideal = (before + 0.5) * (self.period / self.quotas[source])
        order = np.lexsort((source, ideal))
        self._source: NDArray[np.int64] = source[order]
        self._before: NDArray[np.int64] = before[order]

    def select_sources(self, numbers: Ints) -> BlendSlice:
        """Return the source of each sequence of the row, and its place in that source."""
        times, inside = np.divmod(numbers, self.period)
        source = self._source[inside]
        return BlendSlice(source, times * self.quotas[source] + self._before[inside])


def compute_integer_quotas(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the proportion of the weights, none of them zero."""
    assert weights
    assert all(weight > 0 and math.isfinite(weight) for weight in weights)
    # A weight means what it was written as: 0.1 is a tenth, not the nearest binary number.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    whole = sum(exact)
    shares = [weight / whole for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    return _apportioned(shares, max(MAX_PERIOD, 2 * len(shares)))


def _apportioned(shares: list[Fraction], period: int) -> list[int]:
    """Round shares of a period down, at least to one; what is left goes to the largest rests."""
    found = [max(1, math.floor(share * period)) for share in shares]
    rests = [share * period - have for share, have in zip(shares, found, strict=True)]
    left = period - sum(found)
    order = sorted(range(len(shares)), key=lambda one: (-rests[one], one))
    for one in order[: max(0, left)]:
        found[one] += 1
    # Sources too small for their one sequence take it from the largest.
    largest = [(-have, one) for one, have in enumerate(found)]
    heapq.heapify(largest)
    for _ in range(-left):
        have, one = largest[0]
        heapq.heapreplace(largest, (have + 1, one))
        found[one] -= 1
    return found
