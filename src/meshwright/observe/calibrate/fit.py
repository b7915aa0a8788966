"""A subject's curve with its residuals, from some of its rows."""

from collections.abc import Callable, Sequence
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
    """Return the best curve of those found from each start."""
    starts = [{name: one.start for name, one in subject.constants.items()}]
    if like is not None:
        starts.append({name: getattr(like, name) for name in subject.constants})
    names = tuple(subject.constants)[: max(1, len(rows) // ROWS_PER_CONSTANT)]
    free, measured_s = [subject.constants[name] for name in names], [row.seconds for row in rows]
    best, curve = np.inf, subject.curve(starts[0])
    for start in starts:

        def made(values: Array, start: dict[str, float] = start) -> Curve:
            found = dict(zip(names, np.asarray(values).tolist(), strict=True))
            return subject.curve({**start, **found})

        def seconds(values: Array, made: Callable[[Array], Curve] = made) -> Array:
            # One description of the device per trial: the cost functions' caches are keyed by it.
            return predicted_s(subject, _device(gpu, subject, made(values), ()), rows)

        values, loss = fit_logs(
            seconds,
            measured_s,
            [(start[name], one.least, one.most) for name, one in zip(names, free, strict=True)],
        )
        if loss < best:
            best, curve = loss, made([float(f"{value:.4g}") for value in values])
    return curve


def _device(
    gpu: Gpu,
    subject: Subject,
    curve: Curve,
    residuals: tuple[Residuals, ...],
) -> DeviceCosts:
    given = subject.into(Calibration(gpu=gpu.name, source="fit"), curve)
    return costs_for(gpu, msgspec.structs.replace(given, residuals=residuals))
