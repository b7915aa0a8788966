"""A subject's curve with its residuals, from some of its rows."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.calibrate.fit_targets import ROWS_PER_CONSTANT, FitTarget
from meshwright.observe.calibrate.least_squares import fit_log_constants
from meshwright.observe.calibrate.residual_fit import ResidualFit, fit_residuals
from meshwright.predict.cost.calibration import Calibration
from meshwright.predict.cost.curves import AttentionCurve, CurveResiduals, GemmCurve
from meshwright.predict.cost.device_costs import DeviceCosts, build_device_costs
from meshwright.spec.cluster import Gpu

Array = Any
OPTIONAL_CONSTANT = "weight_ratio"
"""A constant that most devices do not need: it is kept where rows gain by it."""
MAX_REMAINING_LOSS = 0.9
"""Share of the loss that may be left then."""
Curve = GemmCurve | AttentionCurve


class FittedCurve(NamedTuple):
    """What was made of one subject."""

    subject: FitTarget
    curve: Curve
    residual_fit: ResidualFit

    @property
    def residuals(self) -> tuple[CurveResiduals, ...]:
        """Those that are kept."""
        return () if self.residual_fit.residuals is None else (self.residual_fit.residuals,)

    def apply_to_device(self, gpu: Gpu) -> DeviceCosts:
        """Return the device with nothing but this replaced."""
        return _device(gpu, self.subject, self.curve, self.residuals)


def fit_curve(
    subject: FitTarget,
    gpu: Gpu,
    rows: Sequence[BenchRow] | None = None,
    *,
    like: Curve | None = None,
) -> FittedCurve:
    """Fit the curve, then what it leaves; of all rows unless only some are given.

    `like` is a curve that may be near: another start, and what few rows leave as it is.
    """
    rows = subject.rows if rows is None else rows
    curve = _fit_curve(subject, gpu, rows, like)
    device = _device(gpu, subject, curve, ())
    logs = np.log([row.median_s for row in rows]) - np.log(
        predict_row_seconds(subject, device, rows)
    )
    left = fit_residuals(
        subject.family, subject.name, [subject.locate_row(row) for row in rows], logs
    )
    return FittedCurve(subject, curve, left)


def predict_row_seconds(subject: FitTarget, device: DeviceCosts, rows: Sequence[BenchRow]) -> Array:
    """Return what the cost models say of rows."""
    return np.array([subject.predict_seconds(device, row) for row in rows])


def _fit_curve(subject: FitTarget, gpu: Gpu, rows: Sequence[BenchRow], like: Curve | None) -> Curve:
    """Return the best curve of those found from each start, with the extra constant if it pays."""
    starts = [{name: one.start for name, one in subject.constants.items()}]
    if like is not None:
        starts.append({name: getattr(like, name) for name in subject.constants})
    number = max(1, len(rows) // ROWS_PER_CONSTANT)
    every = tuple(subject.constants)
    plain = tuple(name for name in every if name != OPTIONAL_CONSTANT)
    # Where it is not free, 1 is as if there were no such constant.
    usual = {OPTIONAL_CONSTANT: 1.0} if OPTIONAL_CONSTANT in every else {}
    tried = (_fit_from(subject, gpu, rows, plain[:number], start | usual) for start in starts)
    loss, found = min(tried, key=itemgetter(0))
    if OPTIONAL_CONSTANT in every[:number]:
        less, more = _fit_from(subject, gpu, rows, every[:number], found)
        found = more if less < MAX_REMAINING_LOSS * loss else found
    return subject.curve(found)


def _fit_from(
    subject: FitTarget,
    gpu: Gpu,
    rows: Sequence[BenchRow],
    names: tuple[str, ...],
    start: dict[str, float],
) -> tuple[float, dict[str, float]]:
    """Return the loss and the constants that are found from a start, the named ones being free."""

    def made(values: Array) -> dict[str, float]:
        return {**start, **dict(zip(names, np.asarray(values).tolist(), strict=True))}

    def seconds(values: Array) -> Array:
        # One description of the device per trial: the cost functions' caches are keyed by it.
        return predict_row_seconds(
            subject, _device(gpu, subject, subject.curve(made(values)), ()), rows
        )

    bounds = [subject.constants[name] for name in names]
    free = [
        (start[name], one.min_value, one.max_value) for name, one in zip(names, bounds, strict=True)
    ]
    values, loss = fit_log_constants(seconds, [row.median_s for row in rows], free)
    return loss, made([float(f"{value:.4g}") for value in values])


def _device(
    gpu: Gpu,
    subject: FitTarget,
    curve: Curve,
    residuals: tuple[CurveResiduals, ...],
) -> DeviceCosts:
    given = subject.apply_curve(Calibration(gpu=gpu.name, source="fit"), curve)
    return build_device_costs(gpu, msgspec.structs.replace(given, residuals=residuals))
