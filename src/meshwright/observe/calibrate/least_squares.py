"""Least squares on logarithms: positive constants in bounds, fitted to times over decades.

Levenberg and Marquardt's damped steps with reweighting for the soft-L1 loss 2 (√(1 + (r/s)²) − 1),
quadratic for errors below the scale s and linear beyond. Constants move on a logarithmic scale, so
a bound at zero is one at a small positive number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = Any

SCALE = 0.05
"""Relative errors beyond it count less and less."""
_STEP, _FARTHEST = 1e-3, 0.7
_MOST_STEPS, _MOST_TRIES = 60, 8
_SMALL_GAIN = 1e-6


def soft_l1_loss(errors: Array) -> float:
    """Return the loss of relative errors."""
    return float(2.0 * (np.sqrt(1.0 + np.square(np.asarray(errors) / SCALE)) - 1.0).sum())


def fit_log_constants(
    seconds: Callable[[Array], Array],
    measured_s: Array,
    free: Sequence[tuple[float, float, float]],
    weights: Array = 1.0,
) -> tuple[Array, float]:
    """Return the constants that bring `seconds` nearest to what was measured, and the loss.

    Each constant is given by where it starts, the least and the most it may be.
    """
    start, low, high = np.log(np.array(free, dtype=float)).T
    target, root = np.log(measured_s), np.sqrt(weights)

    def errors(x: Array) -> Array:
        return root * (np.log(seconds(np.exp(x))) - target)

    x = np.clip(start, low, high)
    found = errors(x)
    loss, damping = soft_l1_loss(found), 1e-2
    for _ in range(_MOST_STEPS):
        slopes = _slopes(errors, x, found, high)
        weight = 1.0 / np.sqrt(1.0 + np.square(found / SCALE))
        curved, down = slopes.T @ (weight[:, None] * slopes), slopes.T @ (weight * found)
        # A constant at its bound that would leave it stays there.
        free = ~(((x <= low) & (down > 0)) | ((x >= high) & (down < 0)))
        for _ in range(_MOST_TRIES):
            tried = np.clip(x + _move(curved, down, free, damping), low, high)
            tried_errors = errors(tried)
            tried_loss = soft_l1_loss(tried_errors)
            if tried_loss < loss:
                break
            damping *= 4.0
        else:
            break
        gain = (loss - tried_loss) / loss
        x, found, loss, damping = tried, tried_errors, tried_loss, max(damping / 3.0, 1e-6)
        if gain < _SMALL_GAIN:
            break
    return np.exp(x), loss


def _slopes(errors: Callable[[Array], Array], x: Array, found: Array, high: Array) -> Array:
    columns = []
    for place in range(len(x)):
        step = _STEP if x[place] + _STEP <= high[place] else -_STEP
        moved = x.copy()
        moved[place] += step
        columns.append((errors(moved) - found) / step)
    return np.stack(columns, axis=1)


def _move(curved: Array, down: Array, free: Array, damping: float) -> Array:
    move = np.zeros(len(down))
    if free.any():
        inner = curved[np.ix_(free, free)]
        damped = inner + damping * np.diag(np.diag(inner) + 1e-6) + 1e-12 * np.eye(len(inner))
        move[free] = -np.linalg.solve(damped, down[free])
    return np.clip(move, -_FARTHEST, _FARTHEST)
