"""`mw twin [MODEL]`: is a step of this machine what the simulator says it is, and if not, why?"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from meshwright.cli.flags.calibration import add_calibration
from meshwright.cli.flags.layouts import format_layout_position, nest_location, read_layouts
from meshwright.cli.parser import add_common
from meshwright.cli.render.files import write_text
from meshwright.cli.render.progress import show_progress
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.cli.twin.drift_monitor import add_drift, run_drift
from meshwright.cli.twin.gpu import TOLERANCE, run_on_gpu
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.observe.twin.default_configs import (
    DEFAULT_LAYOUTS,
    NUM_SEQUENCES,
    SEQ_LEN,
    build_default_cpu_model,
)
from meshwright.observe.twin.layout_twin import (
    LayoutTwin,
    TwinWorkload,
    check_layout,
    find_timing_hazards,
    run_layout_twins,
)
from meshwright.observe.twin.step_comparison import MAX_BUBBLE_POINTS, MAX_STEP_ERROR, StepPhases
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.job_spec import read_model
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_names import describe_layout
from meshwright.spec.model import count_parameters
from meshwright.spec.serialization import encode
from meshwright.spec.units import format_count, format_seconds, parse_count

EXAMPLES = (
    "mw twin",
    'mw twin --layout "pp=2,schedule=zb-h1" --save twin-out',
    'mw twin --layout "tp=2,sequence_parallel=true" --layout "dp=2,zero=1" --check',
    "mw twin --monitor runs/train-tiny",
)
_NEEDED = {"torch"}
_MEANING = (
    "bubble: share of the time from the first pass of a pipeline to its last that a rank spends in "
    "none; around: exchange of gradients, slower replicas and update; "
    "beside: cores that other programs kept busy meanwhile"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = 'mw twin [MODEL] [--layout "KEY=VALUE,…"] [flags]'
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="catalog name, a TOML file, or a folder with config.json (default: a small one)",
    )  # fmt: skip
    parser.add_argument(
        "--layout", action="append", default=[], metavar="LAYOUT", dest="layouts",
        help="fields of a layout, or a TOML file; may be given again (default: many, 2 ranks each)",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "gpu"),
        help="processes on this host's cores, or one GPU (default: a GPU where there is one)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", metavar="WORD",
        help="number format of the products; on cores fp32 or bf16 (default: fp32; on a GPU the "
        "layout's)",
    )  # fmt: skip
    parser.add_argument(
        "--seq-len", metavar="N", help=f"tokens of a sequence (default: {SEQ_LEN}; on a GPU 4096)"
    )
    parser.add_argument(
        "--num-sequences", metavar="N",
        help=f"sequences of a step (default: {NUM_SEQUENCES}; on a GPU a microbatch)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", default="11", metavar="N", help="steps, of which the middle one is taken"
    )
    parser.add_argument(
        "--save", metavar="DIR", help="write both timelines of every layout, and the calibration"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="draw both steps of every layout (ranks on cores only)"
    )
    parser.add_argument(
        "--check", action="store_true",
        help=f"exit with 1 where passes are in another order, a bubble is {MAX_BUBBLE_POINTS:g} "
             f"points "
        f"off or a step {100 * MAX_STEP_ERROR:g} %%; on a GPU where {TOLERANCE}; of a run where "
        f"anything "
        "was found",
    )  # fmt: skip
    add_drift(parser)
    add_calibration(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with a row for each layout, or each configuration of a GPU."""
    if args.monitor is not None:
        return run_drift(args)
    args.seq_len = None if args.seq_len is None else _count(args.seq_len, "--seq-len")
    if args.num_sequences is not None:
        args.num_sequences = _count(args.num_sequences, "--num-sequences")
    if args.device != "cpu" and _has_gpu(args.device == "gpu"):
        if args.html:
            fix = "use --device cpu; mw analyze --html draws a profile of a GPU"
            raise InputError([Problem("--html", "draws ranks on cores", fix)])
        return run_on_gpu(args)
    model = build_default_cpu_model() if args.model is None else read_model(args.model)
    layouts = read_layouts(args.layouts) or list(DEFAULT_LAYOUTS)
    layouts = [replace(layout, precision=args.precision or "fp32") for layout in layouts]
    steps = _count(args.steps, "--steps")
    asked = TwinWorkload(model, args.seq_len or SEQ_LEN, args.num_sequences or NUM_SEQUENCES, steps)
    if args.save:
        _make_room(Path(args.save), len(layouts))
    try:
        _refuse(asked, layouts)
        remarks = find_timing_hazards(layouts)
        calibrations = len({layout.gpus for layout in layouts})
        total, quiet = calibrations + len(layouts), args.quiet or args.json
        with show_progress("running", total, quiet=quiet) as advance:
            found = run_layout_twins(asked, layouts, on_done=lambda: advance(1))
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        hint = "pip install 'meshwright[train]'"
        raise MissingDependency(f"running steps needs {error.name}", hint) from None
    if args.save:
        for number, twin in enumerate(found, 1):
            twin.save(Path(args.save) / str(number))
        remarks.append(f"wrote {args.save}: mw timeline show {args.save}/1/measured")
    answer = _answer(asked, found, remarks, check=args.check)
    if args.html:
        from meshwright.cli.twin.page import render_twin_page

        write_text(args.html, render_twin_page(answer, found))
        note = NoteView(f"wrote {args.html}: open it in a browser")
        answer = answer._replace(views=(*answer.views, note))
    return answer


def _has_gpu(asked: bool) -> bool:
    """Return whether steps run on a GPU; one that was asked for and is not there is refused."""
    try:
        import torch
    except ModuleNotFoundError:
        return False
    found: bool = torch.cuda.is_available()
    if asked and not found:
        fix = "leave --device out to run on this host's cores"
        raise InputError([Problem("--device", "no CUDA device is available", fix)])
    return found


def _refuse(asked: TwinWorkload, layouts: Sequence[Layout]) -> None:
    problems = [
        problem._replace(
            where=nest_location(format_layout_position(number, len(layouts)), problem.where)
        )
        for number, layout in enumerate(layouts, 1)
        for problem in check_layout(asked, layout)
    ]
    if problems:
        raise InputError(problems)


def _make_room(folder: Path, layouts: int) -> None:
    """Make the folders before minutes are spent on what goes there."""
    try:
        for number in range(1, layouts + 1):
            (folder / str(number)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create {folder}: {error.strerror or error}"
        raise InputError([Problem("--save", what, "name another folder")]) from None


def _count(text: str, where: str) -> int:
    found = parse_count(text, where)
    raise_problems(check_integer(where, found))
    return found


def _answer(
    asked: TwinWorkload, found: Sequence[LayoutTwin], remarks: list[str], *, check: bool
) -> CommandResult:
    model, agree = asked.model, all(twin.comparison.is_within_tolerance for twin in found)
    size = format_count(count_parameters(model).total)
    precision = found[0].layout.precision
    data = {
        "model": model.name,
        "precision": precision,
        "seq_len": asked.seq_len,
        "num_sequences": asked.num_sequences,
        "num_steps": asked.num_steps,
        "is_within_tolerance": agree,
        "remarks": remarks,
        "layouts": [_data(twin) for twin in found],
    }
    step = (
        f"{asked.num_sequences} × {asked.seq_len} tokens, {precision}; the middle of "
        f"{asked.num_steps}"
    )
    views: list[View] = [
        make_fields({"model": f"{model.name}, {size} parameters", "step": step}),
        _overview(found),
        _passes(found),
        *(
            make_fields({"first difference": twin.comparison.order_difference}, f"layout {number}")
            for number, twin in enumerate(found, 1)
            if twin.comparison.order_difference
        ),
        NoteView(_MEANING),
        *map(NoteView, remarks),
    ]
    quiet = tuple("agrees" if twin.comparison.is_within_tolerance else "differs" for twin in found)
    return CommandResult("twin/2", data, tuple(views), quiet, 1 if check and not agree else 0)


def _overview(found: Sequence[LayoutTwin]) -> View:
    """One row for each layout; the order of passes is said where some are in another."""
    differ = any(twin.comparison.order_difference for twin in found)
    rows = []
    for number, twin in enumerate(found, 1):
        one = twin.comparison
        rows.append(
            (
                number,
                describe_layout(
                    replace(twin.layout, precision="bf16")
                ),  # the same for all, said above
                *(["differs" if one.order_difference else "same"] if differ else []),
                f"{100 * one.predicted.bubble_share:.1f} %",
                f"{100 * one.measured.bubble_share:.1f} %",
                format_seconds(one.predicted.step_s),
                format_seconds(one.measured.step_s),
                f"{100 * one.step_error:+.1f} %",
                "yes" if one.is_within_tolerance else "no",
            )
        )
    numbers = ", ".join(_NUMBERS)
    columns = f"no., layout, {'order, ' if differ else ''}{numbers}, within"
    return make_table(columns, rows, right=f"no., {numbers}", wide="layout")


_NUMBERS = ("bubble predicted", "measured", "step predicted", "step measured", "off")


def _passes(found: Sequence[LayoutTwin]) -> View:
    """Where a difference comes from: lengths of passes, what lies around them, and others."""
    rows = list[tuple[object, ...]]()
    for number, twin in enumerate(found, 1):
        one = twin.comparison
        parts = [(f"{each.name} × {each.num_passes}", each.predicted_s, each.measured_s)
                 for each in one.pass_durations]  # fmt: skip
        parts.append(("around", one.predicted.outside_passes_s, one.measured.outside_passes_s))
        rows += [
            (number, name, format_seconds(predicted), format_seconds(measured),
             f"{100 * (predicted / measured - 1):+.0f} %" if measured > 0 else "")
            for name, predicted, measured in parts
        ]  # fmt: skip
        if twin.other_busy_cores is not None:
            rows.append((number, "beside", "", f"{twin.other_busy_cores:.2f} cores", ""))
    right = "no., predicted, measured, off"
    return make_table("no., part, predicted, measured, off", rows, right=right)


def _data(twin: LayoutTwin) -> dict[str, Any]:
    one = twin.comparison
    return {
        "layout": encode(twin.layout),
        "order": "differs" if one.order_difference else "same",
        "order_difference": one.order_difference,
        "predicted": _phase(one.predicted),
        "measured": _phase(one.measured),
        "bubble_points": one.bubble_points,
        "step_error": one.step_error,
        "is_within_tolerance": one.is_within_tolerance,
        "other_busy_cores": twin.other_busy_cores,
        "pass_durations": [each._asdict() for each in one.pass_durations],
    }


def _phase(phase: StepPhases) -> dict[str, float]:
    return {
        **phase._asdict(),
        "bubble_share": phase.bubble_share,
        "outside_passes_s": phase.outside_passes_s,
    }
