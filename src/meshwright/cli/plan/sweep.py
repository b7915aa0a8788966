"""Sweeps, the Pareto front and sensitivity of `mw plan`: read, asked, and laid out as tables."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.cli.flags.long_run import read_reliability
from meshwright.cli.plan.flags import PlanRequest, format_defaults_used, read_request
from meshwright.cli.plan.screen import format_brief_layout, plan_to_data
from meshwright.cli.render.progress import SetLabel, show_search_progress
from meshwright.cli.result import CommandResult, NoteView, TableView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.predict.plan import PlanQuestion
from meshwright.predict.plan.studies.pareto_front import ParetoPoint, find_pareto_front
from meshwright.predict.plan.studies.sweeps import (
    SweepPoint,
    parse_range,
    run_sweep,
    vary_question,
)
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import format_count, format_seconds

SWEEP_PARAMETERS = {
    "gpus": "gpus",
    "batch": "batch",
    "global-batch": "batch",
    "length": "length",
    "sequence-length": "length",
}
"""What may be swept, by the words for it."""

_TITLES = {"gpus": "GPUs", "batch": "batch", "length": "length"}

_GIB = 2.0**30

SIMILARITY_TOLERANCE = 0.03
"""Plans of a front whose time and memory differ by less share a line."""


def format_question(question: PlanQuestion, *, gpus: bool = True) -> str:
    """Name a question in a few words."""
    count = f"{question.gpus:,} × " if gpus else ""
    return f"{question.model.name} on {count}{question.cluster.gpu.title}"


def answer_sweep(args: argparse.Namespace) -> CommandResult:
    """Answer the same question at many values of one thing."""
    thing, values = _swept(args.sweep)
    if thing == "gpus" and args.gpus is not None:
        what = "the sweep itself says how many GPUs"
        raise InputError([Problem("--gpus", what, "leave it out")])
    request = read_request(args, gpus=values[0] if thing == "gpus" else None)
    asked = _asked(request.question, thing, values)
    with show_search_progress("sweeping", quiet=args.quiet or args.json) as (report, rename):
        points = run_sweep(_told(asked, thing, rename), exact=args.exact, report=report)
    views: list[View] = [
        make_fields(
            {
                "work": format_question(request.question, gpus=thing != "gpus"),
                "layouts": describe_search_space(args),
                "costs": request.calibration.description,
            }
        ),
        _points(points, thing),
        *_reasons(points),
        *show_defaults_used(request, thing),
    ]
    if args.plot:
        from meshwright.cli.plan.plot import PlottedPoint, draw_scaling

        drawn = [
            PlottedPoint(float(p.value), p.answer.best) for p in points if p.answer is not None
        ]
        if drawn:
            title = format_question(request.question, gpus=thing != "gpus")
            draw_scaling(args.plot, title, thing, drawn, views)
            views.append(NoteView(f"wrote {args.plot}"))
    data = {
        "thing": thing,
        "points": [_point_data(p) for p in points],
        "filled": request.defaults_used,
    }
    quiet = tuple(f"{p.value}\t{p.tokens_per_s:.6g}" for p in points if p.tokens_per_s is not None)
    return CommandResult("plan.sweep/1", data, tuple(views), quiet, 0 if quiet else 1)


def _swept(text: str) -> tuple[str, tuple[int, ...]]:
    word, equals, values = text.partition("=")
    if not equals:
        what = f"{text!r} does not say what to sweep, and over what"
        raise InputError([Problem("--sweep", what, "write it like gpus=256..16384")])
    if word.strip() not in SWEEP_PARAMETERS:
        raise InputError(
            [
                build_unknown_name_problem(
                    "thing to sweep", word.strip(), SWEEP_PARAMETERS, "--sweep"
                )
            ]
        )
    return SWEEP_PARAMETERS[word.strip()], parse_range(values)


def _asked(
    question: PlanQuestion, thing: str, values: Sequence[int]
) -> list[tuple[int, PlanQuestion]]:
    """Return the questions of a sweep, or say which values cannot be."""
    found, problems = [], list[Problem]()
    for value in values:
        try:
            found.append((value, vary_question(question, thing, value)))
        except InputError as error:
            problems += (problem._replace(where="--sweep") for problem in error.problems)
    if problems:
        raise InputError(problems)
    return found


def _told(
    asked: list[tuple[int, PlanQuestion]], thing: str, rename: SetLabel
) -> Iterator[tuple[int, PlanQuestion]]:
    for number, (value, question) in enumerate(asked, start=1):
        rename(f"{number} of {len(asked)}: {_TITLES[thing]} {value:,}")
        yield value, question


def describe_search_space(args: argparse.Namespace) -> str:
    """Describe which layouts are searched."""
    if args.exact:
        return "the whole space"
    return "the usual ones; --exact searches the whole space"


def _points(points: Sequence[SweepPoint], thing: str) -> TableView:
    first = next((p for p in points if p.tokens_per_s is not None), None)
    rows = [_point_row(point, thing, first) for point in points]
    scaled = ", scaling" if thing == "gpus" else ""
    numbers = f"{_TITLES[thing]}, step, tok/s{scaled}, MFU, GiB, $/T"
    return make_table(f"{numbers}, layout", rows, right=numbers, wide="layout")


def _point_row(point: SweepPoint, thing: str, first: SweepPoint | None) -> tuple[str, ...]:
    value = f"{point.value:,}"
    if point.answer is None or point.tokens_per_s is None or point.mfu is None:
        return (value, "–", "", *[""] * (thing == "gpus"), "", "", "", "none fits")
    plan = point.answer.best
    scaled = []
    if thing == "gpus" and first is not None and first.tokens_per_s is not None:
        ideal = first.tokens_per_s * float(point.value) / float(first.value)
        scaled = [f"{point.tokens_per_s / ideal:.0%}"]
    return (
        value,
        format_seconds(plan.step.step_s),
        format_count(point.tokens_per_s),
        *scaled,
        f"{point.mfu:.1%}",
        f"{plan.memory.worst_stage.total_bytes / _GIB:.1f}",
        ""
        if point.dollars_per_trillion_tokens is None
        else format_count(point.dollars_per_trillion_tokens),
        format_brief_layout(plan.layout),
    )


def _reasons(points: Sequence[SweepPoint]) -> list[View]:
    rows = [
        (f"{point.value:,}", problem.what, problem.fix)
        for point in points
        for problem in point.problems
    ]
    return [make_table("at, why none fits, try", rows, wide="why none fits, try")] if rows else []


def show_defaults_used(request: PlanRequest, thing: str = "") -> list[View]:
    """Show which defaults the question used, except the swept one."""
    swept = {"batch": "global_batch", "length": "sequence_length"}.get(thing)
    left = {name: value for name, value in request.defaults_used.items() if name != swept}
    return [NoteView(format_defaults_used(request._replace(defaults_used=left)))] if left else []


def _point_data(point: SweepPoint) -> dict[str, Any]:
    return {
        "value": point.value,
        "exact": point.exact,
        "plan": None if point.answer is None else plan_to_data(point.answer.best),
        "proved": None if point.answer is None else point.answer.is_proved,
        "problems": [problem._asdict() for problem in point.problems],
    }


def run_pareto(args: argparse.Namespace) -> CommandResult:
    """Answer with the plans that none beats in time, memory, price and GPUs at once."""
    counts = parse_range(args.gpus, "--gpus") if args.gpus is not None else ()
    request = read_request(args, gpus=counts[0] if counts else None)
    require_tokens(request, "--front")
    with show_search_progress("looking for the front", quiet=args.quiet or args.json):
        found = find_pareto_front(
            request.question, gpus=counts, exact=args.exact, reliability=read_reliability(args)
        )
    title = format_question(request.question, gpus=len(counts) < 2)
    tokens = format_count(request.question.workload.tokens)
    views: list[View] = [
        make_fields(
            {
                "work": f"{title}, {tokens} tokens",
                "layouts": describe_search_space(args),
                "costs": request.calibration.description,
            }
        ),
        _front(found),
        *show_defaults_used(request),
    ]
    if args.plot and found:
        from meshwright.cli.plan.plot import draw_pareto

        draw_pareto(args.plot, f"{title}, {tokens} tokens", found, views)
        views.append(NoteView(f"wrote {args.plot}"))
    data = {"points": [_front_data(point) for point in found], "filled": request.defaults_used}
    quiet = tuple(f"{point.gpus}\t{point.time_s:.6g}\t{point.price or 0:.6g}" for point in found)
    return CommandResult("plan.front/1", data, tuple(views), quiet, 0 if found else 1)


def require_tokens(request: PlanRequest, flag: str) -> None:
    """Refuse a question about a whole run whose length nobody said."""
    if not request.has_tokens:
        what = f"{flag} asks about a whole run, and nobody said how many tokens"
        raise InputError([Problem("--tokens", what, "add --tokens 15T")])


def _front(points: Sequence[ParetoPoint]) -> TableView:
    """Lay the front out, one line for plans that are nearly the same."""
    kept: list[ParetoPoint] = []
    for point in points:
        if not any(_alike(point, other) for other in kept):
            kept.append(point)
    rows = [
        (
            f"{point.gpus:,}",
            format_seconds(point.time_s),
            "" if point.price is None else f"${format_count(point.price)}",
            f"{point.memory_bytes / _GIB:.1f}",
            format_seconds(point.plan.step.step_s),
            f"{point.plan.step.mfu:.1%}",
            format_brief_layout(point.plan.layout),
        )
        for point in kept
    ]
    numbers = "GPUs, time, price, GiB, step, MFU"
    title = "none beats these in time, memory, price and GPUs at once"
    if len(kept) < len(points):
        title += f" ({len(points) - len(kept)} twins left out)"
    return make_table(f"{numbers}, layout", rows, title, right=numbers, wide="layout")


def _alike(one: ParetoPoint, other: ParetoPoint) -> bool:
    return (
        one.gpus == other.gpus
        and abs(one.time_s / other.time_s - 1) < SIMILARITY_TOLERANCE
        and abs(one.memory_bytes / other.memory_bytes - 1) < SIMILARITY_TOLERANCE
    )


def _front_data(point: ParetoPoint) -> dict[str, Any]:
    return {
        **plan_to_data(point.plan),
        "gpus": point.gpus,
        "time_s": point.time_s,
        "price": point.price,
    }
