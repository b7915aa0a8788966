"""What a curve leaves, interpolated between measured shapes where that predicts others better.

The logarithms of measured over predicted times become weights of a Gaussian process
(`predict/cost/residual_correction.py` has its form). Reach, likeness of kinds and noise are those
with the least loss when each shape is predicted from all others, which has a closed form: with A
the inverse of closeness plus noise, the error at shape i is (A r)ᵢ / Aᵢᵢ (Rasmussen and Williams
2006, 5.4.2).
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.calibrate.least_squares import soft_l1_loss
from meshwright.predict.cost.curves import CurveResiduals, ResidualFamily
from meshwright.predict.cost.residual_correction import matern_kernel

Array = Any

LENGTH_SCALES = (0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
KIND_CORRELATIONS = (0.0, 0.4, 0.8, 0.95)
NOISE_VARIANCES = (0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 2.0)
"""Variance of what does not repeat, over that of what does."""
MIN_ROWS = 8
MIN_LOSS_GAIN = 0.05
"""Share of the loss that corrections must save on shapes left out: choosing the best of many
settings saves a little by itself."""
MAX_LOG_RESIDUAL = 1.5
"""A logarithm beyond it is no correction but another kernel or a fault."""


class ResidualPoint(NamedTuple):
    """Where a row lies among shapes."""

    kind: str
    sizes: tuple[float, ...]


class ResidualFit(NamedTuple):
    """What is known of the residuals of one curve."""

    residuals: CurveResiduals | None
    """None where they would not help."""
    loss_before: float
    """Loss of the curve alone."""
    loss_after: float
    """Loss where each row is predicted from the others."""


def fit_residuals(
    family: ResidualFamily, name: str, places: Sequence[ResidualPoint], logs: Array
) -> ResidualFit:
    """Return residuals, or None where they do not make rows left out come out better."""
    values = np.clip(logs, -MAX_LOG_RESIDUAL, MAX_LOG_RESIDUAL)
    before = soft_l1_loss(values)
    if len(places) < MIN_ROWS:
        return ResidualFit(None, before, before)
    kinds = [place.kind for place in places]
    sizes = np.log2(np.array([place.sizes for place in places]))
    best, chosen = np.inf, (0.0, 0.0)
    weights = np.zeros(len(values))
    likenesses = KIND_CORRELATIONS if len(set(kinds)) > 1 else (0.0,)
    for reach, likeness in product(LENGTH_SCALES, likenesses):
        near = matern_kernel(kinds, sizes, kinds, sizes, reach=reach, likeness=likeness)
        spread, turn = np.linalg.eigh(near)
        turned = turn.T @ values
        for noise in NOISE_VARIANCES:
            share = 1.0 / (np.maximum(spread, 0.0) + noise)
            found = turn @ (share * turned)
            loss = soft_l1_loss(found / (np.square(turn) @ share))
            if loss < best:
                best, chosen, weights = loss, (reach, likeness), found
    if best > (1.0 - MIN_LOSS_GAIN) * before:
        return ResidualFit(None, before, best)
    points = tuple(
        f"{place.kind} {' '.join(str(round(size)) for size in place.sizes)} {weight:.4g}"
        for place, weight in zip(places, weights.tolist(), strict=True)
    )
    reach, likeness = chosen
    found_residuals = CurveResiduals(
        family=family, name=name, reach=reach, likeness=likeness, points=points
    )
    return ResidualFit(found_residuals, before, best)
