"""How far predictions lie from rows that they were not fitted to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.calibrate.curve_fit import (
    Curve,
    FittedCurve,
    fit_curve,
    predict_row_seconds,
)
from meshwright.observe.calibrate.fit_targets import FitTarget
from meshwright.spec.cluster import Gpu

FOLDS = 5
"""Rows come in a designed order, with which five folds do not line up."""

Array = Any


class FitScore(NamedTuple):
    """Relative errors of predicted against measured times."""

    num_rows: int
    median: float
    """Of their sizes."""
    p95: float
    mean: float
    bias: float
    """Their mean with signs: above 0 says too long."""
    worst_error: float
    """With its sign."""
    worst_case: str


def score_predictions(rows: Sequence[BenchRow], predicted: Array) -> FitScore:
    """Score predicted times."""
    errors = np.asarray(predicted) / np.array([row.median_s for row in rows]) - 1.0
    sizes = np.abs(errors)
    worst = int(sizes.argmax())
    return FitScore(
        num_rows=len(rows),
        median=float(np.median(sizes)),
        p95=float(np.quantile(sizes, 0.95)),
        mean=float(sizes.mean()),
        bias=float(errors.mean()),
        worst_error=float(errors[worst]),
        worst_case=rows[worst].case.key,
    )


def cross_validate(subject: FitTarget, gpu: Gpu, *, like: Curve | None = None) -> Array | None:
    """Predict each row from a fit without its fifth of all rows; None where they are too few."""
    rows = subject.rows
    if len(rows) < 2 * FOLDS:
        return None
    places = np.arange(len(rows)) % FOLDS
    found = np.zeros(len(rows))
    for fold in range(FOLDS):
        kept = [row for row, place in zip(rows, places, strict=True) if place != fold]
        out = [row for row, place in zip(rows, places, strict=True) if place == fold]
        fitted = fit_curve(subject, gpu, kept, like=like)
        found[places == fold] = predict_row_seconds(subject, fitted.apply_to_device(gpu), out)
    return found


def score_by_part(rows: Sequence[BenchRow], predicted: Array) -> dict[str, FitScore]:
    """Score each part of a subject by itself."""
    found = np.asarray(predicted)
    parts = np.array([row.case.name for row in rows])
    return {
        part: score_predictions(
            [row for row in rows if row.case.name == part], found[parts == part]
        )
        for part in dict.fromkeys(parts.tolist())
    }


def predict_validation_rows(fitted: FittedCurve, gpu: Gpu, rows: Sequence[BenchRow]) -> Array:
    """Predict rows that the fit has never seen."""
    return predict_row_seconds(fitted.subject, fitted.apply_to_device(gpu), rows)
