"""Corrections near measured shapes: what a curve left there, faded out with the distance.

    log(time / curve) at x = Σ weight × kind × (1 + √3 r) exp(−√3 r)

r is the distance between two shapes in doublings of their sizes, over a reach; `kind` is 1 between
calls of one kind and less between others. That is the mean of a Gaussian process with a Matérn 3/2
kernel (Rasmussen and Williams 2006, section 4.2); the weights are found by `observe/calibrate`.
Far from everything measured, and without residuals, nothing is corrected.
"""

from collections.abc import Sequence
from math import exp, log2
from typing import Any

from meshwright.predict.cost.curves import CurveResiduals

Array = Any


def matern_kernel(
    kinds: Sequence[str],
    logs: Array,
    other_kinds: Sequence[str],
    other_logs: Array,
    *,
    reach: float,
    likeness: float,
) -> Array:
    """Return how much each shape says of each other one, from 0 to 1; sizes are base-2 logs."""
    import numpy as np

    apart = np.asarray(logs)[:, None, :] - np.asarray(other_logs)[None, :, :]
    far = np.sqrt(3.0 * np.square(apart).sum(axis=2)) / reach
    same = np.asarray(kinds)[:, None] == np.asarray(other_kinds)[None, :]
    return (1.0 + far) * np.exp(-far) * np.where(same, 1.0, likeness)


class ResidualCorrection:
    """Residuals ready to be used; callers cache what they make of it per shape."""

    def __init__(self, residuals: CurveResiduals) -> None:
        import numpy as np

        self._kinds, sizes, weights = residuals.parse_points()
        self._logs, self._weights = np.log2(np.array(sizes)), np.array(weights)
        self._reach, self._likeness = residuals.reach, residuals.likeness
        seen = self._at(self._kinds, self._logs)
        # Never more than was seen anywhere: between shapes weights could add up to anything.
        self._low, self._high = float(min(0.0, seen.min())), float(max(0.0, seen.max()))

    @property
    def min_factor(self) -> float:
        """The smallest factor there is."""
        return exp(self._low)

    def factor(self, kind: str, *sizes: float) -> float:
        """Return by how much a call takes longer than its curve says."""
        value = float(self._at((kind,), [[log2(size) for size in sizes]])[0])
        return exp(min(self._high, max(self._low, value)))

    def _at(self, kinds: Sequence[str], logs: Array) -> Array:
        near = matern_kernel(
            kinds, logs, self._kinds, self._logs, reach=self._reach, likeness=self._likeness
        )
        return near @ self._weights
