"""What a curve leaves, interpolated between measured shapes where that predicts others better.

The logarithms of measured over predicted times become weights of a Gaussian process
(`predict/cost/residuals.py` has its form). Reach, likeness of kinds and noise are those with the
least loss when each shape is predicted from all others, which has a closed form: with A the inverse
of closeness plus noise, the error at shape i is (A r)ᵢ / Aᵢᵢ (Rasmussen and Williams 2006, 5.4.2).
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.calibrate.solve import soft_loss
from meshwright.predict.cost.curves import ResidualFamily, Residuals
from meshwright.predict.cost.residuals import closeness

Array = Any

REACHES = (0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
LIKENESSES = (0.0, 0.4, 0.8, 0.95)
NOISES = (0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 2.0)
"""Variance of what does not repeat, over that of what does."""
LEAST_ROWS = 8
LEAST_GAIN = 0.05
"""Share of the loss that corrections must save on shapes left out: choosing the best of many
settings saves a little by itself."""
MOST = 1.5
"""A logarithm beyond it is no correction but another kernel or a fault."""


class Place(NamedTuple):
    """Where a row lies among shapes."""

    kind: str
    sizes: tuple[float, ...]


class Left(NamedTuple):
    """What is known of the residuals of one curve."""

    residuals: Residuals | None
    """None where they would not help."""
    before: float
    """Loss of the curve alone."""
    after: float
    """Loss where each row is predicted from the others."""


def fit_residuals(family: ResidualFamily, name: str, places: Sequence[Place], logs: Array) -> Left:
    """Return residuals, or None where they do not make rows left out come out better."""
    values = np.clip(logs, -MOST, MOST)
    before = soft_loss(values)
    if len(places) < LEAST_ROWS:
        return Left(None, before, before)
    kinds = [place.kind for place in places]
    sizes = np.log2(np.array([place.sizes for place in places]))
    best, chosen = np.inf, (0.0, 0.0)
    weights = np.zeros(len(values))
    likenesses = LIKENESSES if len(set(kinds)) > 1 else (0.0,)
    for reach, likeness in product(REACHES, likenesses):
        near = closeness(kinds, sizes, kinds, sizes, reach=reach, likeness=likeness)
        spread, turn = np.linalg.eigh(near)
        turned = turn.T @ values
        for noise in NOISES:
            share = 1.0 / (np.maximum(spread, 0.0) + noise)
            found = turn @ (share * turned)
            loss = soft_loss(found / (np.square(turn) @ share))
            if loss < best:
                best, chosen, weights = loss, (reach, likeness), found
    if best > (1.0 - LEAST_GAIN) * before:
        return Left(None, before, best)
    points = tuple(
        f"{place.kind} {' '.join(str(round(size)) for size in place.sizes)} {weight:.4g}"
        for place, weight in zip(places, weights.tolist(), strict=True)
    )
    reach, likeness = chosen
    found_residuals = Residuals(
        family=family, name=name, reach=reach, likeness=likeness, points=points
    )
    return Left(found_residuals, before, best)
