"""A subject's curve with its residuals, from some of its rows."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.observe.bench.case import Row
from meshwright.observe.calibrate.residuals import Left, fit_residuals
from meshwright.observe.calibrate.solve import fit_logs
from meshwright.observe.calibrate.subjects import ROWS_PER_CONSTANT, Subject
from meshwright.predict.cost.curves import AttentionCurve, Calibration, ProductCurve, Residuals
from meshwright.predict.cost.device import DeviceCosts, costs_for
from meshwright.spec.cluster import Gpu

Array = Any
EXTRA = "weight_ratio"
"""A constant that most devices do not need: it is kept where rows gain by it."""
WORTH = 0.9
"""Share of the loss that may be left then."""
Curve = ProductCurve | AttentionCurve


class Fitted(NamedTuple):
    """What was made of one subject."""

    subject: Subject
    curve: Curve
    left: Left

    @property
    def residuals(self) -> tuple[Residuals, ...]:
        """Those that are kept."""
        return () if self.left.residuals is None else (self.left.residuals,)

    def device(self, gpu: Gpu) -> DeviceCosts:
        """Return the device with nothing but this replaced."""
        return _device(gpu, self.subject, self.curve, self.residuals)


def fit_subject(
    subject: Subject, gpu: Gpu, rows: Sequence[Row] | None = None, *, like: Curve | None = None
) -> Fitted:
    """Fit the curve, then what it leaves; of all rows unless only some are given.

    `like` is a curve that may be near: another start, and what few rows leave as it is.
    """
    rows = subject.rows if rows is None else rows
    curve = _fit_curve(subject, gpu, rows, like)
    device = _device(gpu, subject, curve, ())
    logs = np.log([row.seconds for row in rows]) - np.log(predicted_s(subject, device, rows))
    left = fit_residuals(subject.family, subject.name, [subject.place(row) for row in rows], logs)
    return Fitted(subject, curve, left)


def predicted_s(subject: Subject, device: DeviceCosts, rows: Sequence[Row]) -> Array:
    """Return what the cost models say of rows."""
    return np.array([subject.seconds(device, row) for row in rows])


def _fit_curve(subject: Subject, gpu: Gpu, rows: Sequence[Row], like: Curve | None) -> Curve:
    """Return the best curve of those found from each start, with the extra constant if it pays."""
    starts = [{name: one.start for name, one in subject.constants.items()}]
    if like is not None:
        starts.append({name: getattr(like, name) for name in subject.constants})
    number = max(1, len(rows) // ROWS_PER_CONSTANT)
    every = tuple(subject.constants)
    plain = tuple(name for name in every if name != EXTRA)
    # Where it is not free, 1 is as if there were no such constant.
    usual = {EXTRA: 1.0} if EXTRA in every else {}
    tried = (_fit_from(subject, gpu, rows, plain[:number], start | usual) for start in starts)
    loss, found = min(tried, key=itemgetter(0))
    if EXTRA in every[:number]:
        less, more = _fit_from(subject, gpu, rows, every[:number], found)
        found = more if less < WORTH * loss else found
    return subject.curve(found)


def _fit_from(
    subject: Subject,
    gpu: Gpu,
    rows: Sequence[Row],
    names: tuple[str, ...],
    start: dict[str, float],
) -> tuple[float, dict[str, float]]:
    """Return the loss and the constants that are found from a start, the named ones being free."""

    def made(values: Array) -> dict[str, float]:
        return {**start, **dict(zip(names, np.asarray(values).tolist(), strict=True))}

    def seconds(values: Array) -> Array:
        # One description of the device per trial: the cost functions' caches are keyed by it.
        return predicted_s(subject, _device(gpu, subject, subject.curve(made(values)), ()), rows)

    bounds = [subject.constants[name] for name in names]
    free = [(start[name], one.least, one.most) for name, one in zip(names, bounds, strict=True)]
    values, loss = fit_logs(seconds, [row.seconds for row in rows], free)
    return loss, made([float(f"{value:.4g}") for value in values])


def _device(
    gpu: Gpu,
    subject: Subject,
    curve: Curve,
    residuals: tuple[Residuals, ...],
) -> DeviceCosts:
    given = subject.into(Calibration(gpu=gpu.name, source="fit"), curve)
    return costs_for(gpu, msgspec.structs.replace(given, residuals=residuals))
