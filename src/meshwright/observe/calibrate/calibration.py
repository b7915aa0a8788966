"""Rows of a bench become a `Calibration`, with what can be said of its errors."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.suite import BenchResult
from meshwright.observe.calibrate.bandwidth_fit import (
    BandwidthFit,
    fit_bandwidth,
    fit_launch,
    score_launch,
)
from meshwright.observe.calibrate.curve_fit import (
    Curve,
    FittedCurve,
    fit_curve,
    predict_row_seconds,
)
from meshwright.observe.calibrate.fit_score import (
    FitScore,
    cross_validate,
    predict_validation_rows,
    score_by_part,
    score_predictions,
)
from meshwright.observe.calibrate.fit_targets import FitTarget, list_fit_targets
from meshwright.observe.calibrate.host_link_fit import fit_host_link
from meshwright.observe.calibrate.measured_device import identify_device
from meshwright.predict.cost.calibration import Calibration
from meshwright.predict.cost.curves import MEMORY_OPS
from meshwright.predict.cost.device_costs import build_device_costs
from meshwright.spec.cluster import Gpu

SOFTWARE = "meshwright"
"""Whose kernels `mw bench` calls."""
REFERENCE_CURVE = "gemm bf16"
"""Of which other products' curves are taken to be like."""


class FamilyFitReport(NamedTuple):
    """What was made of one family."""

    title: str
    in_sample: FitScore
    """On the rows that were fitted."""
    cross_validated: FitScore | None
    """Each row predicted from a fit without it; None where rows are too few."""
    by_part: dict[str, FitScore]
    """The same by part."""
    validation: FitScore | None
    """On rows of another file."""
    validation_by_part: dict[str, FitScore]
    has_residual_fit: bool
    """Whether residuals were kept."""
    under_load: bool
    """Whether the device was under load."""


class CalibrationFit(NamedTuple):
    """A calibration, and how good it is."""

    calibration: Calibration
    gpu: Gpu
    reports: tuple[FamilyFitReport, ...]
    missing: tuple[str, ...]
    """What was not measured, in words."""


def calibrate(
    bench: BenchResult, held: Sequence[BenchRow] = (), *, gpu: str = ""
) -> CalibrationFit:
    """Fit everything that rows tell of; the rest stays as it is by default."""
    if not bench.rows:
        fix = "run `mw bench` to the end of at least one family"
        raise InputError([Problem("rows", "there are none to fit", fix)])
    device, peaks = identify_device(bench.machine, bench.rows, gpu)
    source = _source(bench)
    found = Calibration(gpu=device.name, source=source, peaks=peaks)
    reports = list[FamilyFitReport]()
    seen = {row.case.key for row in bench.rows}
    unseen = _telling([row for row in held if row.case.key not in seen])
    others = {one.title: one for one in list_fit_targets(unseen, device)}
    first: Curve | None = None
    for subject in list_fit_targets(_telling(bench.rows), device):
        like = first if subject.family == "products" else None
        fitted = fit_curve(subject, device, like=like)
        first = fitted.curve if subject.title == REFERENCE_CURVE else first
        report = _report(fitted, device, others.get(subject.title), like)
        reports.append(report)
        found = _with(found, fitted, report, source)
    plain = fit_bandwidth(_telling(bench.rows), device.memory_bytes_per_s, source, unseen)
    kernel_s = None if plain is None else plain.kernel_s
    launch = fit_launch(bench.rows, kernel_s, build_device_costs(device).launch, source)
    link = fit_host_link(_telling(bench.rows), device.pcie_bytes_per_s, source)
    found = msgspec.structs.replace(
        found,
        memory=() if plain is None else plain.curves,
        launch=launch,
        link=None if link is None else link.curve,
    )
    if plain is not None:
        loaded = any(row.under_load for row in bench.rows if row.case.family == "memory_bound")
        reports.append(_plain_report(plain, loaded=loaded))
    launched = score_launch(bench.rows, launch)
    reports += [] if launched is None else [_bare_report("launching, spread of samples", launched)]
    reports += [] if link is None else [_bare_report("copies to and from the host", link.in_sample)]
    if not reports:
        what = "no row is of a family that a cost model has constants for"
        fix = "run `mw bench --families gemm,attention,memory_bound`"
        raise InputError([Problem("rows", what, fix)])
    if any(row.under_load for row in bench.rows if row.case.family == "gemm"):
        found = msgspec.structs.replace(found, sustained_slowdown=1.0, software=SOFTWARE)
    return CalibrationFit(found, device, tuple(reports), _missing(found, device))


def _telling(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return rows under load where a family has any, since a training step is made there."""
    timed = [row for row in rows if row.median_s > 0]
    loaded = {row.case.family for row in timed if row.under_load}
    return [row for row in timed if row.under_load or row.case.family not in loaded]


def _report(
    fitted: FittedCurve, gpu: Gpu, other: FitTarget | None, like: Curve | None
) -> FamilyFitReport:
    subject = fitted.subject
    folds = cross_validate(subject, gpu, like=like)
    held = () if other is None else other.rows
    held_s = predict_validation_rows(fitted, gpu, held) if held else None
    return FamilyFitReport(
        title=subject.title,
        in_sample=score_predictions(
            subject.rows, predict_row_seconds(subject, fitted.apply_to_device(gpu), subject.rows)
        ),
        cross_validated=None if folds is None else score_predictions(subject.rows, folds),
        by_part={} if folds is None else score_by_part(subject.rows, folds),
        validation=None if held_s is None else score_predictions(held, held_s),
        validation_by_part={} if held_s is None else score_by_part(held, held_s),
        has_residual_fit=bool(fitted.residuals),
        under_load=all(row.under_load for row in subject.rows),
    )


def _plain_report(plain: BandwidthFit, *, loaded: bool) -> FamilyFitReport:
    return FamilyFitReport(
        title=f"memory-bound, {len(plain.curves)} classes",
        in_sample=plain.in_sample,
        cross_validated=plain.cross_validated,
        by_part=plain.by_part,
        validation=plain.validation,
        validation_by_part=plain.validation_by_part,
        has_residual_fit=False,
        under_load=loaded,
    )


def _bare_report(title: str, own: FitScore) -> FamilyFitReport:
    return FamilyFitReport(title, own, None, {}, None, {}, has_residual_fit=False, under_load=False)


def _with(
    found: Calibration, fitted: FittedCurve, report: FamilyFitReport, source: str
) -> Calibration:
    best = report.validation or report.cross_validated
    curve = msgspec.structs.replace(
        fitted.curve,
        source=source,
        error=None if best is None else round(best.mean, 4),
        bias=None if best is None else round(best.bias, 4),
    )
    found = fitted.subject.apply_curve(found, curve)
    return msgspec.structs.replace(found, residuals=(*found.residuals, *fitted.residuals))


def _source(bench: BenchResult) -> str:
    machine = bench.machine
    words = [f"mw bench on {machine.device or 'an unnamed device'}"]
    words += [f"torch {machine.torch}"] if machine.torch else []
    words += [f"driver {machine.driver}"] if machine.driver else []
    return f"{', '.join(words)}; {len(bench.rows)} rows"


def _missing(found: Calibration, gpu: Gpu) -> tuple[str, ...]:
    """Say what keeps its default constants."""
    words = [
        f"products {precision}"
        for precision in ("bf16", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise")
        if precision in gpu.precisions
        and precision not in {curve.precision for curve in found.products}
    ]
    words += ["grouped products"] if found.grouped is None else []
    parts = {curve.part for curve in found.attention}
    words += [f"attention {part}" for part in ("forward", "backward") if part not in parts]
    ops = [op for op in MEMORY_OPS if op not in {curve.op for curve in found.memory}]
    words += [f"elementwise: {', '.join(ops)}"] if ops else []
    words += ["launching"] if found.launch is None else []
    words += ["copies to and from the host"] if gpu.kind == "gpu" and found.link is None else []
    return tuple(words)
