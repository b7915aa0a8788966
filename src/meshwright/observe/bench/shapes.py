"""Shapes to measure so that others need not be: spread evenly over what training multiplies.

Points follow Roberts' additive sequence for three dimensions, whose n-th point is n times the
powers of 1/φ₃ modulo one (φ₃ ≈ 1.2207 solves x⁴ = x + 1): any first stretch of it covers the cube
evenly, so a short measurement uses the beginning of a long one, and what lies behind a stretch
tests what was learnt from it. Sides are taken on a logarithmic scale and rounded to whole tiles.
"""

from collections.abc import Iterator
from itertools import count, islice
from math import exp, log
from typing import NamedTuple

_PLASTIC = 1.2207440846057596
_STEPS = tuple(_PLASTIC**-power for power in (1, 2, 3))


class Range(NamedTuple):
    """Whole numbers from one to another, all multiples of a third."""

    least: int
    most: int
    multiple: int

    def at(self, place: float) -> int:
        """Return the number at a place between 0 and 1, evenly spread in its logarithm."""
        value = exp(log(self.least) + place * (log(self.most) - log(self.least)))
        return max(self.least, self.multiple * round(value / self.multiple))


class Shape(NamedTuple):
    """A product of an m × k and a k × n matrix."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k


TOKENS = Range(512, 65536, 128)
WIDTHS = Range(512, 32768, 64)
LEAST_FLOPS, MOST_FLOPS = 2e9, 1e13
"""Smaller products are launched, not computed; larger ones are many waves of the same tiles."""


def points() -> Iterator[tuple[float, float, float]]:
    """Yield points that cover the unit cube evenly, for ever."""
    for number in count(1):
        yield tuple((0.5 + number * step) % 1.0 for step in _STEPS)  # type: ignore[misc]


def product_shapes(number: int, *, after: int = 0) -> tuple[Shape, ...]:
    """Return that many shapes; `after` skips those that an earlier stretch has."""
    return tuple(islice(_shapes(), after, after + number))


def _shapes() -> Iterator[Shape]:
    seen = set[Shape]()
    for first, second, third in points():
        shape = Shape(TOKENS.at(first), WIDTHS.at(second), WIDTHS.at(third))
        if LEAST_FLOPS <= shape.flops <= MOST_FLOPS and shape not in seen:
            seen.add(shape)
            yield shape
