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


class SizeRange(NamedTuple):
    """Whole numbers from one to another, all multiples of a third."""

    min_value: int
    max_value: int
    multiple: int

    def interpolate(self, place: float) -> int:
        """Return the number at a place between 0 and 1, evenly spread in its logarithm."""
        value = exp(log(self.min_value) + place * (log(self.max_value) - log(self.min_value)))
        return max(self.min_value, self.multiple * round(value / self.multiple))


class BenchGemmShape(NamedTuple):
    """A product of an m × k and a k × n matrix."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k


TOKENS = SizeRange(512, 65536, 128)
WIDTHS = SizeRange(512, 32768, 64)
MIN_FLOPS, MAX_FLOPS = 2e9, 1e13
"""Smaller products are launched, not computed; larger ones are many waves of the same tiles."""


def iter_cube_points() -> Iterator[tuple[float, float, float]]:
    """Yield points that cover the unit cube evenly, for ever."""
    for number in count(1):
        yield tuple((0.5 + number * step) % 1.0 for step in _STEPS)  # type: ignore[misc]


def sample_gemm_shapes(number: int, *, after: int = 0) -> tuple[BenchGemmShape, ...]:
    """Return that many shapes; `after` skips those that an earlier stretch has."""
    return tuple(islice(_shapes(), after, after + number))


def _shapes() -> Iterator[BenchGemmShape]:
    seen = set[BenchGemmShape]()
    for first, second, third in iter_cube_points():
        shape = BenchGemmShape(
            TOKENS.interpolate(first), WIDTHS.interpolate(second), WIDTHS.interpolate(third)
        )
        if MIN_FLOPS <= shape.flops <= MAX_FLOPS and shape not in seen:
            seen.add(shape)
            yield shape
