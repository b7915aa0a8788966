"""Rows of a bench become a `Calibration`, with what can be said of its errors."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.observe.bench.case import Row
from meshwright.observe.bench.suite import Bench
from meshwright.observe.calibrate.device import device_of
from meshwright.observe.calibrate.fit import Curve, Fitted, fit_subject, predicted_s
from meshwright.observe.calibrate.link import fit_link
from meshwright.observe.calibrate.plain import Plain, fit_launch, fit_memory, launch_score
from meshwright.observe.calibrate.score import Score, by_part, folded, held_out, score
from meshwright.observe.calibrate.subjects import Subject, subjects
from meshwright.predict.cost.curves import MEMORY_OPS, Calibration
from meshwright.predict.cost.device import costs_for
from meshwright.spec.cluster import Gpu

SOFTWARE = "meshwright"
"""Whose kernels `mw bench` calls."""
FIRST = "products bf16"
"""Of which other products' curves are taken to be like."""


class Report(NamedTuple):
    """What was made of one family."""

    title: str
    own: Score
    """On the rows that were fitted."""
    folds: Score | None
    """Each row predicted from a fit without it; None where rows are too few."""
    parts: dict[str, Score]
    """The same by part."""
    held: Score | None
    """On rows of another file."""
    held_parts: dict[str, Score]
    corrected: bool
    """Whether residuals were kept."""
    loaded: bool
    """Whether the device was under load."""


class Calibrated(NamedTuple):
    """A calibration, and how good it is."""

    calibration: Calibration
    gpu: Gpu
    reports: tuple[Report, ...]
    missing: tuple[str, ...]
    """What was not measured, in words."""


def calibrate(bench: Bench, held: Sequence[Row] = (), *, gpu: str = "") -> Calibrated:
    """Fit everything that rows tell of; the rest stays as it is by default."""
    if not bench.rows:
        fix = "run `mw bench` to the end of at least one family"
        raise InputError([Problem("rows", "there are none to fit", fix)])
    device, peaks = device_of(bench.machine, bench.rows, gpu)
    source = _source(bench)
    found = Calibration(gpu=device.name, source=source, peaks=peaks)
    reports = list[Report]()
    seen = {row.case.key for row in bench.rows}
    unseen = _telling([row for row in held if row.case.key not in seen])
    others = {one.title: one for one in subjects(unseen, device)}
    first: Curve | None = None
    for subject in subjects(_telling(bench.rows), device):
        like = first if subject.family == "products" else None
        fitted = fit_subject(subject, device, like=like)
        first = fitted.curve if subject.title == FIRST else first
        report = _report(fitted, device, others.get(subject.title), like)
        reports.append(report)
        found = _with(found, fitted, report, source)
    plain = fit_memory(_telling(bench.rows), device.memory_bytes_per_s, source, unseen)
    kernel_s = None if plain is None else plain.kernel_s
    launch = fit_launch(bench.rows, kernel_s, costs_for(device).launch, source)
    link = fit_link(_telling(bench.rows), device.pcie_bytes_per_s, source)
    found = msgspec.structs.replace(
        found,
        memory=() if plain is None else plain.curves,
        launch=launch,
        link=None if link is None else link.curve,
    )
    if plain is not None:
        loaded = any(row.loaded for row in bench.rows if row.case.family == "elementwise")
        reports.append(_plain_report(plain, loaded=loaded))
    launched = launch_score(bench.rows, launch)
    reports += [] if launched is None else [_bare_report("launching, spread of samples", launched)]
    reports += [] if link is None else [_bare_report("copies to and from the host", link.own)]
    if not reports:
        what = "no row is of a family that a cost model has constants for"
        fix = "measure products, attention or elementwise work: `mw bench`"
        raise InputError([Problem("rows", what, fix)])
    if any(row.loaded for row in bench.rows if row.case.family == "products"):
        found = msgspec.structs.replace(found, sustained_slowdown=1.0, software=SOFTWARE)
    return Calibrated(found, device, tuple(reports), _missing(found, device))


def _telling(rows: Sequence[Row]) -> list[Row]:
    """Return rows under load where a family has any, since a training step is made there."""
    timed = [row for row in rows if row.seconds > 0]
    loaded = {row.case.family for row in timed if row.loaded}
    return [row for row in timed if row.loaded or row.case.family not in loaded]


def _report(fitted: Fitted, gpu: Gpu, other: Subject | None, like: Curve | None) -> Report:
    subject = fitted.subject
    folds = folded(subject, gpu, like=like)
    held = () if other is None else other.rows
    held_s = held_out(fitted, gpu, held) if held else None
    return Report(
        title=subject.title,
        own=score(subject.rows, predicted_s(subject, fitted.device(gpu), subject.rows)),
        folds=None if folds is None else score(subject.rows, folds),
        parts={} if folds is None else by_part(subject.rows, folds),
        held=None if held_s is None else score(held, held_s),
        held_parts={} if held_s is None else by_part(held, held_s),
        corrected=bool(fitted.residuals),
        loaded=all(row.loaded for row in subject.rows),
    )


def _plain_report(plain: Plain, *, loaded: bool) -> Report:
    return Report(
        title=f"elementwise, {len(plain.curves)} classes",
        own=plain.own,
        folds=plain.folds,
        parts=plain.parts,
        held=plain.held,
        held_parts=plain.held_parts,
        corrected=False,
        loaded=loaded,
    )


def _bare_report(title: str, own: Score) -> Report:
    return Report(title, own, None, {}, None, {}, corrected=False, loaded=False)


def _with(found: Calibration, fitted: Fitted, report: Report, source: str) -> Calibration:
    best = report.held or report.folds
    curve = msgspec.structs.replace(
        fitted.curve,
        source=source,
        error=None if best is None else round(best.mean, 4),
        bias=None if best is None else round(best.bias, 4),
    )
    found = fitted.subject.into(found, curve)
    return msgspec.structs.replace(found, residuals=(*found.residuals, *fitted.residuals))


def _source(bench: Bench) -> str:
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
