"""How far predictions lie from rows that they were not fitted to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.bench.case import Row
from meshwright.observe.calibrate.fit import Curve, Fitted, fit_subject, predicted_s
from meshwright.observe.calibrate.subjects import Subject
from meshwright.spec.cluster import Gpu

FOLDS = 5
"""Rows come in a designed order, with which five folds do not line up."""

Array = Any


class Score(NamedTuple):
    """Relative errors of predicted against measured times."""

    rows: int
    median: float
    """Of their sizes."""
    p95: float
    mean: float
    bias: float
    """Their mean with signs: above 0 says too long."""
    worst: float
    """With its sign."""
    worst_case: str


def score(rows: Sequence[Row], predicted: Array) -> Score:
    """Score predicted times."""
    errors = np.asarray(predicted) / np.array([row.seconds for row in rows]) - 1.0
    sizes = np.abs(errors)
    worst = int(sizes.argmax())
    return Score(
        rows=len(rows),
        median=float(np.median(sizes)),
        p95=float(np.quantile(sizes, 0.95)),
        mean=float(sizes.mean()),
        bias=float(errors.mean()),
        worst=float(errors[worst]),
        worst_case=rows[worst].case.key,
    )


def folded(subject: Subject, gpu: Gpu, *, like: Curve | None = None) -> Array | None:
    """Predict each row from a fit without its fifth of all rows; None where they are too few."""
    rows = subject.rows
    if len(rows) < 2 * FOLDS:
        return None
    places = np.arange(len(rows)) % FOLDS
    found = np.zeros(len(rows))
    for fold in range(FOLDS):
        kept = [row for row, place in zip(rows, places, strict=True) if place != fold]
        out = [row for row, place in zip(rows, places, strict=True) if place == fold]
        fitted = fit_subject(subject, gpu, kept, like=like)
        found[places == fold] = predicted_s(subject, fitted.device(gpu), out)
    return found


def by_part(rows: Sequence[Row], predicted: Array) -> dict[str, Score]:
    """Score each part of a subject by itself."""
    found = np.asarray(predicted)
    parts = np.array([row.case.name for row in rows])
    return {
        part: score([row for row in rows if row.case.name == part], found[parts == part])
        for part in dict.fromkeys(parts.tolist())
    }


def held_out(fitted: Fitted, gpu: Gpu, rows: Sequence[Row]) -> Array:
    """Predict rows that the fit has never seen."""
    return predicted_s(fitted.subject, fitted.device(gpu), rows)
