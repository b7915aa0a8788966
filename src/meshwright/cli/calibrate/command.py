"""`mw calibrate ROWS`: this device's own constants from what `mw bench` measured on it."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, TableView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.suite import BenchResult, read_bench
from meshwright.observe.calibrate.calibration import CalibrationFit, FamilyFitReport, calibrate
from meshwright.observe.calibrate.calibration_file import build_default_path, write_calibration
from meshwright.observe.calibrate.fit_score import FitScore
from meshwright.predict.cost.calibration import Calibration
from meshwright.predict.cost.curves import AttentionCurve, GemmCurve
from meshwright.spec.units import format_seconds

EXAMPLES = (
    "mw calibrate bench.jsonl",
    "mw calibrate bench.jsonl --validation-rows others.jsonl -o h200.toml",
)

MEDIAN_TOLERANCE, P95_TOLERANCE = 0.04, 0.12
"""What products should come within on shapes that were not measured."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw calibrate ROWS [-o FILE] [--validation-rows ROWS] [flags]"
    parser.add_argument("rows", metavar="ROWS", help="the file that `mw bench -o` wrote")
    parser.add_argument(
        "-o", "--output", metavar="FILE",
        help="where to write (default: the user's folder, where predictions look for it)",
    )  # fmt: skip
    parser.add_argument(
        "--validation-rows",
        metavar="ROWS",
        help="rows of the same device to score with, never fitted",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", default="",
        help="which device of `mw gpus` the rows are of, where they do not say",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="fit and report, and write nothing")
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what was fitted, and how well."""
    bench = _read(args.rows)
    held = _read(args.validation_rows) if args.validation_rows else None
    if held is not None and held.machine.device != bench.machine.device:
        what = f"is of {held.machine.device}, and the rows are of {bench.machine.device}"
        raise InputError([Problem("--validation-rows", what, "measure both on one device")])
    found = calibrate(bench, () if held is None else held.rows, gpu=args.gpu)
    path = Path(args.output) if args.output else build_default_path(found.gpu.name)
    if path is None:
        what = "there is no folder of the user's to write to"
        raise InputError([Problem("-o", what, "name a file with -o")])
    notes = list(_notes(found))
    if args.dry_run:
        notes.append("nothing was written")
    else:
        write_calibration(found.calibration, path)
        asked = f" with --calibration {path}" if args.output else ""
        notes.append(f"wrote {path}: simulate, plan and whatif use it{asked}")
    data = {
        "gpu": found.gpu.name,
        "path": None if args.dry_run else str(path),
        "families": [_report_data(report) for report in found.reports],
        "missing": list(found.missing),
        "calibration": msgspec.to_builtins(found.calibration),
    }
    views: list[View] = [
        make_fields(
            {
                "device": f"{found.gpu.title} ({found.gpu.name})",
                "rows": f"{len(bench.rows)} of {args.rows}",
                "state": _state(found.calibration),
                "stays default": "; ".join(found.missing),
            }
        ),
        _errors(found.reports),
        _furthest(found.reports),
        _constants(found.calibration),
        *(NoteView(text) for text in notes),
    ]
    return CommandResult("calibrate/2", data, tuple(views), (str(path),))


def _read(path: str) -> BenchResult:
    if not Path(path).is_file():
        fix = "give the file that `mw bench -o FILE` wrote"
        raise InputError([Problem(path, "there is no such file", fix)])
    return read_bench(Path(path))


def _state(calibration: Calibration) -> str:
    if calibration.software:
        return (
            "under load, kernels as the trainer calls them: its steps are predicted without "
            "allowances"
        )
    return "not under load: predictions keep their allowances for a training step"


def _errors(reports: tuple[FamilyFitReport, ...]) -> TableView:
    """Return one line per family, and for dense products one per part."""
    rows = list[tuple[object, ...]]()
    for report in reports:
        best, parts = _best(report)
        rows.append((report.title, *_cells(best), _scored(report)))
        if report.title.startswith("gemm ") and len(parts) > 1:
            rows += [(f"  {part}", *_cells(each), "") for part, each in parts.items()]
    return make_table(
        "family, rows, median, 95th, bias, worst, scored on",
        rows,
        "error of predicted times",
        right="rows, median, 95th, bias, worst",
        wide="family",
    )


_NOTICED = 0.01


def _furthest(reports: tuple[FamilyFitReport, ...]) -> TableView:
    """Return the case of each family whose prediction is furthest off."""
    rows = []
    for report in reports:
        best, _ = _best(report)
        if abs(best.worst_error) < _NOTICED:
            continue
        name, _, sizes = best.worst_case.partition("/")[2].partition("/")
        rows.append(
            (report.title, f"{best.worst_error:+.0%}", f"{name}: {sizes.replace(',', ', ')}")
        )
    return make_table("family, worst, case", rows, "the worst of each", right="worst", wide="case")


def _best(report: FamilyFitReport) -> tuple[FitScore, dict[str, FitScore]]:
    """Return the score that says most: of other rows, of folds, or of the fitted rows."""
    if report.validation is not None:
        return report.validation, report.validation_by_part
    if report.cross_validated is not None:
        return report.cross_validated, report.by_part
    return report.in_sample, {}


def _scored(report: FamilyFitReport) -> str:
    if report.validation is not None:
        return "held-out rows"
    return "rows left out" if report.cross_validated is not None else "fitted rows"


def _cells(found: FitScore) -> tuple[str, ...]:
    shares = (
        f"{found.median:.1%}",
        f"{found.p95:.1%}",
        f"{found.bias:+.1%}",
        f"{found.worst_error:+.0%}",
    )
    return (str(found.num_rows), *shares)


def _constants(found: Calibration) -> TableView:
    rows = [(f"gemm {curve.precision}", _product_words(curve)) for curve in found.products]
    if found.grouped is not None:
        rows.append(("grouped gemm", _product_words(found.grouped)))
    rows += [(f"attention {curve.part}", _attention_words(curve)) for curve in found.attention]
    rows += [(curve.op, f"{curve.efficiency:.0%} of the bandwidth") for curve in found.memory]
    if found.launch is not None:
        launch = found.launch
        words = f"{format_seconds(launch.host_s)} of the host for a kernel, "
        words += f"{format_seconds(launch.graph_s)} for a graph; "
        rows.append(("launching", words + f"{format_seconds(launch.kernel_s)} on the device"))
    if found.link is not None:
        words = f"{found.link.share:.0%} of the wire speed one way; both ways at once each takes "
        rows.append(("copies to and from the host", words + f"{found.link.crossing:.0%} longer"))
    return make_table("what, constants", rows, "what was found", wide="constants")


def _product_words(curve: GemmCurve) -> str:
    return (
        f"{curve.efficiency:.0%} of the peak inside full tiles (gradients "
        f"{curve.gradient_ratio * curve.efficiency:.0%}), {curve.bandwidth:.0%} of the bandwidth, "
        f"{format_seconds(curve.launch_s)} to start, a tile's ends are worth "
        f"{curve.fill_k:.0f} of k"
    )


def _attention_words(curve: AttentionCurve) -> str:
    return (
        f"{curve.efficiency:.0%} of the peak, softmax is worth {curve.softmax_dims:.0f} "
        f"dimensions, a block's ends {curve.fill_keys:.0f} keys, "
        f"{format_seconds(curve.launch_s)} to start"
    )


def _notes(found: CalibrationFit) -> list[str]:
    notes = list[str]()
    if found.calibration.peaks is not None:
        notes.append(
            f"{found.gpu.name} is no GPU of the catalog: shares are of the best rates measured "
            f"here, and a cluster file whose gpu is called {found.gpu.name} can use them"
        )
    off = [
        report.title
        for report in found.reports
        if report.title.startswith("gemm")
        and (_best(report)[0].median > MEDIAN_TOLERANCE or _best(report)[0].p95 > P95_TOLERANCE)
    ]
    if off:
        notes.append(
            f"over {MEDIAN_TOLERANCE:.0%} in the middle or {P95_TOLERANCE:.0%} at the 95th: "
            f"{', '.join(off)}; "
            "measure more of their shapes, or on a quieter device"
        )
    kept = [report.title for report in found.reports if report.has_residual_fit]
    if kept:
        notes.append(f"interpolated between measured shapes: {', '.join(kept)}")
    few = [
        report.title
        for report in found.reports
        if report.cross_validated is None and not report.validation
    ]
    if few:
        notes.append(f"scored on the fitted rows themselves: {', '.join(few)}")
    return notes


def _report_data(report: FamilyFitReport) -> dict[str, Any]:
    def each(found: FitScore | None) -> dict[str, Any] | None:
        return None if found is None else found._asdict()

    return {
        "family": report.title,
        "in_sample": each(report.in_sample),
        "cross_validated": each(report.cross_validated),
        "cross_validated_by_part": {part: each(one) for part, one in report.by_part.items()},
        "validation": each(report.validation),
        "validation_by_part": {part: each(one) for part, one in report.validation_by_part.items()},
        "has_residual_fit": report.has_residual_fit,
        "under_load": report.under_load,
    }
