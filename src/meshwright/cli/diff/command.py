"""`mw diff A B`: two profiles, or a prediction and a measurement: what changed, by cost."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from meshwright.cli.flags.calibration import add_calibration, add_software, choose_calibration
from meshwright.cli.flags.trace_input import TraceRanks, parse_number_list
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.device_time.kernel_names import shorten_name
from meshwright.observe.analyze.run_diff import CostChange, RunDiff, diff_profiles
from meshwright.observe.analyze.spans.analysis_extent import AnalysisExtent
from meshwright.observe.analyze.spans.row_selection import select_steps
from meshwright.observe.analyze.step_profile import StepProfile, build_step_profile
from meshwright.spec.units import format_quantity
from meshwright.timeline.timeline import Timeline

EXAMPLES = (
    "mw diff before.json.gz after.json.gz",
    "mw diff monday/ tuesday/ --fail-above 2",
    "mw diff examples/llama3-70b.toml measured/",
)

_SHOWN = 7


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw diff A B [flags]"
    parser.add_argument(
        "a",
        metavar="A",
        help="a trace, a folder of ranks, or a work file (.toml): its predicted step",
    )
    parser.add_argument("b", metavar="B", help="the same; B is compared with A")
    parser.add_argument("--ranks", metavar="LIST", help="only these ranks of both: 3, or 0-3,7")
    parser.add_argument("--steps", metavar="LIST", help="only these steps of both: 11, or 11-13")
    parser.add_argument("--num-workers", metavar="N", default="1", help="read with N processes")
    parser.add_argument(
        "--fail-above", metavar="PERCENT",
        help="exit with 1 where a step of B takes so much longer than one of A",
    )  # fmt: skip
    parser.add_argument(
        "--no-cache", action="store_true", help="neither use nor keep what was read before"
    )
    add_calibration(parser)
    add_software(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what changed, most costly first."""
    limit = _limit(args.fail_above)
    damaged: list[str] = []
    costs: list[str] = []
    a, b = (_profile(path, args, damaged, costs) for path in (args.a, args.b))
    found = diff_profiles(a, b)
    slower = found.cost_ns / a.step_ns if a.step_ns else 0.0
    failed = limit is not None and 100 * slower > limit
    views = (*_screen(found), *(NoteView(line) for line in (*costs, *found.notes, *damaged)))
    quiet = tuple(
        f"{change.cost_ns / 1e6:.4f}\t{change.category}\t{change.name}"
        for change in found.regressions
    )
    data = {**_data(found), "costs": costs}
    return CommandResult("diff/1", data, views, quiet, 1 if failed or damaged else 0)


def _limit(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        limit = float(text.rstrip("% "))
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):  # Nothing is above nan: such a guard would let everything pass.
        problem = Problem("--fail-above", f"{text!r} is no number", "give percent, such as 2")
        raise InputError([problem])
    return limit


def _profile(
    path: str, args: argparse.Namespace, damaged: list[str], costs: list[str]
) -> StepProfile:
    steps = parse_number_list("--steps", args.steps)
    extent = AnalysisExtent.ALL if steps else AnalysisExtent.COMPLETE_STEPS
    if path.endswith(".toml"):
        step, words = predict_profile(path, args)
        costs.append(f"{path} is predicted by {words}")
        return build_step_profile([step], path, extent)
    parts = TraceRanks(path, args)
    found = build_step_profile(
        (select_steps(part, steps) if steps else part for part in parts), path, extent
    )
    if not found.ranks:
        raise parts.no_ranks_error()
    if not found.step_ns:
        raise parts.no_device_work_error()
    damaged += parts.damaged
    return found


def predict_profile(path: str, args: argparse.Namespace) -> tuple[Timeline, str]:
    """The step that `mw simulate` predicts for a work file, and by which constants."""
    from meshwright.cli.flags.work import add_work, require_valid_layout, resolve_work
    from meshwright.predict.event_sim.step_simulation import simulate_step
    from meshwright.predict.training_run.training_run import TrainingRun

    parser = argparse.ArgumentParser()
    add_work(parser)
    resolved = resolve_work(parser.parse_args([path]))
    require_valid_layout(resolved)
    used = choose_calibration(args, resolved.work.cluster.gpu)
    run = TrainingRun(resolved.work, calibration=used.calibration, framework=used.framework)
    return simulate_step(run).build_timeline(), used.description


def _screen(found: RunDiff) -> tuple[View, ...]:
    views: list[View] = [make_fields(_head(found)), _phases(found)]
    for title, rows in (("slower", found.regressions), ("faster", found.improvements)):
        if rows:
            views.append(_changes(f"what got {title}, ms per step", rows))
    operators = [change for change in found.operators if change.a and change.b][:4]
    if operators:
        views.append(_changes("operators that changed most, device ms per step", operators))
    lonely = {
        "only in A": _lonely(found.only_in_a),
        "only in B": _lonely(found.only_in_b),
    }
    if any(lonely.values()):
        views.append(make_fields(lonely, "without a partner"))
    return tuple(views)


def _head(found: RunDiff) -> dict[str, str]:
    head = {name: _about(one) for name, one in (("A", found.a), ("B", found.b))}
    share = found.cost_ns / found.a.step_ns if found.a.step_ns else 0.0
    head["step"] = (
        f"{found.a.step_ns / 1e6:.2f} ms → {found.b.step_ns / 1e6:.2f} ms"
        f" ({found.cost_ns / 1e6:+.2f} ms, {100 * share:+.1f} %)"
    )
    if found.a.overlap_share is not None and found.b.overlap_share is not None:
        head["overlap"] = (
            f"{100 * found.a.overlap_share:.1f} % → {100 * found.b.overlap_share:.1f} %"
        )
    return head


def _about(one: StepProfile) -> str:
    ranks = f"{len(one.ranks)} ranks" if len(one.ranks) > 1 else f"rank {one.ranks[0]}"
    steps = format_quantity(max(one.num_steps), "step") if any(one.num_steps) else "no steps marked"
    return f"{one.label} ({one.source.value}, {ranks}, {steps})"


def _phases(found: RunDiff) -> View:
    rows = []
    for change in (
        *found.phases,
        *(CostChange("idle", f"  {c.name}", c.a, c.b) for c in found.idle),
    ):
        if change.a is None or change.b is None or not (change.a.ns or change.b.ns):
            continue
        rows.append(
            (
                change.name,
                f"{change.a.ns / 1e6:.2f}",
                f"{change.b.ns / 1e6:.2f}",
                f"{change.cost_ns / 1e6:+.2f}",
                f"{100 * change.cost_ns / found.a.step_ns:+.1f} %",
            )
        )
    return make_table(
        "phase, A, B, change, of A's step", rows, "time of the device, ms per step",
        right="A, B, change, of A's step",
    )  # fmt: skip


def _changes(title: str, changes: Sequence[CostChange]) -> View:
    rows = [
        (
            f"{change.cost_ns / 1e6:+.3f}",
            _ms(change.a.ns) if change.a else "",
            _ms(change.b.ns) if change.b else "",
            _calls(change),
            change.category,
            shorten_name(change.name, 60) if change.category == "kernel" else change.name[:60],
        )
        for change in changes[:_SHOWN]
    ]
    more = len(changes) - len(rows)
    return make_table(
        "change, A, B, calls, kind, name", rows, title + (f" ({more} more)" if more else ""),
        right="change, A, B, calls",
    )  # fmt: skip


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f}"


def _calls(change: CostChange) -> str:
    a, b = (f"{side.calls:.4g}" if side else "0" for side in (change.a, change.b))
    if a == b == "0":
        return ""
    return a if a == b else f"{a} → {b}"


def _lonely(changes: Sequence[CostChange]) -> str:
    if not changes:
        return ""
    total = sum(abs(change.cost_ns) for change in changes) / 1e6
    longest = sorted(changes, key=lambda change: -abs(change.cost_ns))[:3]
    names = ", ".join(shorten_name(change.name, 44) for change in longest)
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return f"{len(changes)} of {total:.2f} ms per step: {names}{more}"


def _data(found: RunDiff) -> dict[str, Any]:
    return {
        "a": _side(found.a),
        "b": _side(found.b),
        "change_ms_per_step": found.cost_ns / 1e6,
        **{
            name: [_row(change) for change in getattr(found, name)]
            for name in ("phases", "idle", "kernels", "operators", "collectives", "regressions")
        },
        "only_in_a": [_row(change) for change in found.only_in_a],
        "only_in_b": [_row(change) for change in found.only_in_b],
        "notes": list(found.notes),
    }


def _side(one: StepProfile) -> dict[str, Any]:
    return {
        "path": one.label,
        "source": one.source.value,
        "ranks": list(one.ranks),
        "steps": list(one.num_steps),
        "step_ms": one.step_ns / 1e6,
        "overlap": one.overlap_share,
    }


def _row(change: CostChange) -> dict[str, Any]:
    return {
        "what": change.category,
        "name": change.name,
        "a_ms": change.a.ns / 1e6 if change.a else None,
        "b_ms": change.b.ns / 1e6 if change.b else None,
        "a_calls": change.a.calls if change.a else None,
        "b_calls": change.b.calls if change.b else None,
        "change_ms": change.cost_ns / 1e6,
    }
