"""`mw whatif WORK THING=VALUES`: one thing changed at a time, and what the step makes of it."""

import argparse
from typing import Any

from meshwright.cli.flags.calibration import add_calibration, add_software, choose_calibration
from meshwright.cli.flags.work import add_work, require_valid_layout, resolve_work, show_sources
from meshwright.cli.parser import add_common
from meshwright.cli.render.step_bars import STEP_SEGMENTS, draw_step_bar
from meshwright.cli.render.step_chart import StepChartRow, write_step_chart
from meshwright.cli.result import CommandResult, NoteView, TableView, View, make_fields, make_table
from meshwright.predict.step.step_prediction import StepPrediction
from meshwright.predict.whatif.whatif import WhatIfCase, WhatIfChange, read_changes, what_if
from meshwright.predict.whatif.whatif_parameters import WHATIF_PARAMETERS
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_count, format_seconds

EXAMPLES = (
    "mw whatif examples/llama3-70b.toml nic=x2,x4",
    "mw whatif examples/llama3-70b.toml nvlink_domain=8,72 precision=fp8",
    "mw whatif examples/llama3-70b.toml tp=1,2,4,8 --svg tp.svg",
    "mw whatif llama3.1-8b --cluster h100-superpod --gpus 64 --zero 1 microbatch=1,2,4",
)
_BAR = 12
_GIB = 2.0**30


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw whatif [WORK ...] [THING=VALUE,VALUE ...] [flags]"
    things = "\n".join(f"  {name:<17} {WHATIF_PARAMETERS[name].summary}" for name in _OWN_WORDS)
    group = parser.add_argument_group(
        "what to vary",
        "THING=VALUES beside the work, each thing by itself. Values are written as in a work file\n"
        "or against what there is: x2, /2, +10%. Every field of a layout (tp, schedule, …), and\n"
        + things,
    )
    group.add_argument(
        "--vary", metavar="THING=VALUES", action="append", default=[],
        help="the same as a flag; may be given several times",
    )  # fmt: skip
    group.add_argument("--svg", metavar="FILE", help="write the chart as a picture")
    add_work(parser)
    add_calibration(parser)
    add_software(parser)
    add_common(parser)


_OWN_WORDS = [name for name in WHATIF_PARAMETERS if name not in Layout.__struct_fields__]


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the chart."""
    asks = read_changes([*(word for word in args.files if "=" in word), *args.vary])
    args.files = [word for word in args.files if "=" not in word]
    resolved = resolve_work(args)
    if args.dry_run:
        return show_sources(resolved)
    require_valid_layout(resolved)
    used = choose_calibration(args, resolved.work.cluster.gpu)
    baseline, *cases = what_if(
        resolved.work,
        asks or choose_default_parameters(resolved.work),
        used.calibration,
        used.framework,
    )
    assert baseline.step is not None
    views: list[View] = [
        make_fields({"work": _heading(resolved.work), "costs": used.description}),
        _chart(baseline, cases),
        _legend([baseline, *cases]),
    ]
    if any(case.parameter == "nic" for case in cases) and _host_limits(resolved.work):
        views.append(
            NoteView("the host link is no faster than the NICs: faster NICs change nothing")
        )
    failed = [case for case in cases if case.step is None]
    if failed:
        views.append(_reasons(failed))
    if args.svg:
        rows = [_picture(case, baseline.step) for case in (baseline, *cases)]
        write_step_chart(args.svg, _heading(resolved.work), rows)
        views.append(NoteView(f"wrote {args.svg}"))
    data = {
        "baseline": _data(baseline, baseline.step),
        "cases": [_data(case, baseline.step) for case in cases],
        "calibration": used.data,
        "framework": args.framework,
    }
    quiet = tuple(
        f"{case.parameter}={case.value}\t{case.step.step_s:.6g}" for case in cases if case.step
    )
    return CommandResult("whatif/2", data, tuple(views), quiet, 0 if quiet else 1)


def _host_limits(work: JobSpec) -> bool:
    """Whether a GPU's way to its network card is no faster than its share of the cards."""
    cluster = work.cluster
    if cluster.nics is None:
        return False
    cards = cluster.nics.per_node * cluster.nics.nic_bytes_per_s / cluster.gpus_per_node
    return cluster.host.gpu_bytes_per_s <= 1.3 * cards


def choose_default_parameters(work: JobSpec) -> tuple[WhatIfChange, ...]:
    """What is varied where nothing is asked: the hardware's main figures and the usual knobs."""
    texts = ["nic=x2", "flops=x2", "memory_bandwidth=x2", "gpus=x2", "microbatch=x2"]
    texts += ["nvlink_domain=72"] if work.cluster.scale_up.gpus < 72 else []
    texts += ["precision=fp8"] if work.layout.precision in ("bf16", "fp16") else []
    return read_changes(texts)


def _heading(work: JobSpec) -> str:
    return f"{work.model.name} on {work.layout.gpus:,} × {work.cluster.gpu.title}"


def _chart(baseline: WhatIfCase, cases: list[WhatIfCase]) -> TableView:
    """One bar per value, all to the same scale."""
    assert baseline.step is not None
    longest = max(case.step.step_s for case in [baseline, *cases] if case.step is not None)
    rows = [_row(case, baseline.step, longest) for case in [baseline, *cases]]
    numbers = "step, change, tok/s, MFU, GiB, $/T"
    return make_table(
        "what if, step, change, bar, tok/s, MFU, GiB, $/T",
        rows, right=numbers, wide="what if", bars="bar",
    )  # fmt: skip


def _row(case: WhatIfCase, base: StepPrediction, longest_s: float) -> tuple[str, ...]:
    if case.step is None or case.memory is None:
        return (_label(case), "–", "", "cannot be", "", "", "", "")
    step = case.step
    return (
        _label(case),
        format_seconds(step.step_s),
        _change(step, base) if case.parameter else "",
        draw_step_bar(step, longest_s, _BAR),
        format_count(step.tokens_per_s),
        f"{step.mfu:.0%}",
        f"{case.memory.worst_stage.total_bytes / _GIB:.1f}{'' if case.memory.fits else '!'}",
        "" if case.dollars is None else format_count(case.dollars),
    )


def _label(case: WhatIfCase) -> str:
    """Name a case and what had to change with it."""
    words = [f"{case.parameter} {case.value}".strip()]
    for name, value in case.dependent_changes.items():
        if isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(f"{name} {value}" if isinstance(value, int | str) else f"other {name}")
    return ", ".join(words)


def _change(step: StepPrediction, base: StepPrediction) -> str:
    return f"{step.step_s / base.step_s - 1:+.1%}"


def _picture(case: WhatIfCase, base: StepPrediction) -> StepChartRow:
    if case.step is None or case.memory is None:
        return StepChartRow(_label(case), None, f"cannot be: {case.problems[0].what}")
    text = format_seconds(case.step.step_s)
    text += f" ({_change(case.step, base)})" if case.parameter else ""
    return StepChartRow(
        _label(case), case.step, text + ("" if case.memory.fits else ", does not fit")
    )


def _legend(cases: list[WhatIfCase]) -> NoteView:
    shown = [
        f"{part.mark} {part.name}"
        for part in STEP_SEGMENTS
        if any(case.step is not None and getattr(case.step, part.field) > 0 for case in cases)
    ]
    over = any(case.memory is not None and not case.memory.fits for case in cases)
    return NoteView(
        ", ".join([*shown, "$/T: dollars for a trillion tokens", *["! too much"] * over])
    )


def _reasons(failed: list[WhatIfCase]) -> TableView:
    rows = [
        (f"{case.parameter} {case.value}", problem.what, problem.fix)
        for case in failed
        for problem in case.problems
    ]
    return make_table("what if, why it cannot be, fix", rows, wide="why it cannot be, fix")


def _data(case: WhatIfCase, base: StepPrediction) -> dict[str, Any]:
    data: dict[str, Any] = {
        "parameter": case.parameter,
        "value": case.value,
        "dependent_changes": case.dependent_changes,
    }
    if case.step is not None and case.memory is not None:
        data |= {name: getattr(case.step, name) for name in case.step.__struct_fields__}
        data |= {
            "change": case.step.step_s / base.step_s - 1,
            "memory_bytes": case.memory.worst_stage.total_bytes,
            "capacity_bytes": case.memory.capacity_bytes,
            "fits": case.memory.fits,
            "dollars_per_trillion_tokens": case.dollars,
        }
    return {**data, "problems": [problem._asdict() for problem in case.problems]}
