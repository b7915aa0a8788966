"""`mw twin [MODEL]`: is a step of this machine what the simulator says it is, and if not, why?"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.calibrations import add_calibration
from meshwright.cli.files import write_text
from meshwright.cli.layouts import layout_at, read_layouts, within
from meshwright.cli.parser import add_common
from meshwright.cli.progress import progress
from meshwright.cli.twin_gpu import WITHIN, run_on_gpu
from meshwright.cli.twin_watch import add_watch, run_watch
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.observe.twin.compare import BUBBLE_POINTS, STEP_SHARE, Phase
from meshwright.observe.twin.layouts import LENGTH, SEQUENCES, STANDARD, small_model
from meshwright.observe.twin.twins import Asked, Twin, doubts, problems_of, twins
from meshwright.spec.bounds import require, whole
from meshwright.spec.layout import Layout
from meshwright.spec.layout.words import words_of
from meshwright.spec.model import count_parameters
from meshwright.spec.read import plain
from meshwright.spec.units import format_count, format_seconds, parse_count
from meshwright.spec.work import read_model

EXAMPLES = (
    "mw twin",
    'mw twin --layout "pp=2,schedule=zb-h1" --save twin-out',
    'mw twin --layout "tp=2,sequence_parallel=true" --layout "dp=2,zero=1" --check',
    "mw twin --watch runs/train-tiny",
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
        "--sequence", metavar="N", help=f"tokens of a sequence (default: {LENGTH}; on a GPU 4096)"
    )
    parser.add_argument(
        "--sequences", metavar="N",
        help=f"sequences of a step (default: {SEQUENCES}; on a GPU a microbatch)",
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
        help=f"exit with 1 where passes are in another order, a bubble is {BUBBLE_POINTS:g} points "
        f"off or a step {100 * STEP_SHARE:g} %%; on a GPU where {WITHIN}; of a run where anything "
        "was found",
    )  # fmt: skip
    add_watch(parser)
    add_calibration(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with a row for each layout, or each configuration of a GPU."""
    if args.watch is not None:
        return run_watch(args)
    args.sequence = None if args.sequence is None else _count(args.sequence, "--sequence")
    args.sequences = None if args.sequences is None else _count(args.sequences, "--sequences")
    if args.device != "cpu" and _has_gpu(args.device == "gpu"):
        if args.html:
            fix = "use --device cpu; mw analyze --html draws a profile of a GPU"
            raise InputError([Problem("--html", "draws ranks on cores", fix)])
        return run_on_gpu(args)
    model = small_model() if args.model is None else read_model(args.model)
    layouts = read_layouts(args.layouts) or list(STANDARD)
    layouts = [replace(layout, precision=args.precision or "fp32") for layout in layouts]
    steps = _count(args.steps, "--steps")
    asked = Asked(model, args.sequence or LENGTH, args.sequences or SEQUENCES, steps)
    if args.save:
        _make_room(Path(args.save), len(layouts))
    try:
        _refuse(asked, layouts)
        remarks = doubts(layouts)
        calibrations = len({layout.gpus for layout in layouts})
        total, quiet = calibrations + len(layouts), args.quiet or args.json
        with progress("running", total, quiet=quiet) as advance:
            found = twins(asked, layouts, on_done=lambda: advance(1))
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        hint = "pip install 'meshwright[train]'"
        raise MissingPart(f"running steps needs {error.name}", hint) from None
    if args.save:
        for number, twin in enumerate(found, 1):
            twin.save(Path(args.save) / str(number))
        remarks.append(f"wrote {args.save}: mw timeline show {args.save}/1/measured")
    answer = _answer(asked, found, remarks, check=args.check)
    if args.html:
        from meshwright.cli.twin_page import page

        write_text(args.html, page(answer, found))
        note = Note(f"wrote {args.html}: open it in a browser")
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
        raise InputError([Problem("--device", "torch sees no GPU here", fix)])
    return found


def _refuse(asked: Asked, layouts: Sequence[Layout]) -> None:
    problems = [
        problem._replace(where=within(layout_at(number, len(layouts)), problem.where))
        for number, layout in enumerate(layouts, 1)
        for problem in problems_of(asked, layout)
    ]
    if problems:
        raise InputError(problems)


def _make_room(folder: Path, layouts: int) -> None:
    """Make the folders before minutes are spent on what goes there."""
    try:
        for number in range(1, layouts + 1):
            (folder / str(number)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{folder} cannot be made: {error.strerror or error}"
        raise InputError([Problem("--save", what, "name another folder")]) from None


def _count(text: str, where: str) -> int:
    found = parse_count(text, where)
    require(whole(where, found))
    return found


def _answer(asked: Asked, found: Sequence[Twin], remarks: list[str], *, check: bool) -> Answer:
    model, agree = asked.model, all(twin.comparison.agrees for twin in found)
    size = format_count(count_parameters(model).total)
    precision = found[0].layout.precision
    data = {
        "model": model.name,
        "precision": precision,
        "sequence": asked.length,
        "sequences": asked.sequences,
        "steps": asked.steps,
        "agree": agree,
        "remarks": remarks,
        "layouts": [_data(twin) for twin in found],
    }
    step = f"{asked.sequences} × {asked.length} tokens, {precision}; the middle of {asked.steps}"
    views: list[View] = [
        facts({"model": f"{model.name}, {size} parameters", "step": step}),
        _overview(found),
        _passes(found),
        *(
            facts({"first difference": twin.comparison.difference}, f"layout {number}")
            for number, twin in enumerate(found, 1)
            if twin.comparison.difference
        ),
        Note(_MEANING),
        *map(Note, remarks),
    ]
    quiet = tuple("agrees" if twin.comparison.agrees else "differs" for twin in found)
    return Answer("twin/1", data, tuple(views), quiet, 1 if check and not agree else 0)


def _overview(found: Sequence[Twin]) -> View:
    """One row for each layout; the order of passes is said where some are in another."""
    differ = any(twin.comparison.difference for twin in found)
    rows = []
    for number, twin in enumerate(found, 1):
        one = twin.comparison
        rows.append(
            (
                number,
                words_of(replace(twin.layout, precision="bf16")),  # the same for all, said above
                *(["differs" if one.difference else "same"] if differ else []),
                f"{100 * one.predicted.bubble:.1f} %",
                f"{100 * one.measured.bubble:.1f} %",
                format_seconds(one.predicted.step_s),
                format_seconds(one.measured.step_s),
                f"{100 * one.step_error:+.1f} %",
                "yes" if one.agrees else "no",
            )
        )
    numbers = ", ".join(_NUMBERS)
    columns = f"no., layout, {'order, ' if differ else ''}{numbers}, within"
    return table(columns, rows, right=f"no., {numbers}", wide="layout")


_NUMBERS = ("bubble predicted", "measured", "step predicted", "step measured", "off")


def _passes(found: Sequence[Twin]) -> View:
    """Where a difference comes from: lengths of passes, what lies around them, and others."""
    rows = list[tuple[object, ...]]()
    for number, twin in enumerate(found, 1):
        one = twin.comparison
        parts = [(f"{each.name} × {each.passes}", each.predicted_s, each.measured_s)
                 for each in one.lengths]  # fmt: skip
        parts.append(("around", one.predicted.around_s, one.measured.around_s))
        rows += [
            (number, name, format_seconds(predicted), format_seconds(measured),
             f"{100 * (predicted / measured - 1):+.0f} %" if measured > 0 else "")
            for name, predicted, measured in parts
        ]  # fmt: skip
        if twin.beside is not None:
            rows.append((number, "beside", "", f"{twin.beside:.2f} cores", ""))
    right = "no., predicted, measured, off"
    return table("no., part, predicted, measured, off", rows, right=right)


def _data(twin: Twin) -> dict[str, Any]:
    one = twin.comparison
    return {
        "layout": plain(twin.layout),
        "order": "differs" if one.difference else "same",
        "difference": one.difference,
        "predicted": _phase(one.predicted),
        "measured": _phase(one.measured),
        "bubble_points": one.bubble_points,
        "step_error": one.step_error,
        "agrees": one.agrees,
        "beside_cores": twin.beside,
        "passes": [each._asdict() for each in one.lengths],
    }


def _phase(phase: Phase) -> dict[str, float]:
    return {**phase._asdict(), "bubble": phase.bubble, "around_s": phase.around_s}
