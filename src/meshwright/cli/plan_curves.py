"""Sweeps, the Pareto front and sensitivity of `mw plan`: read, asked, and laid out as tables."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.cli.answer import Answer, Note, Table, View, facts, table
from meshwright.cli.long_run import reliability
from meshwright.cli.plan_progress import Rename, searching
from meshwright.cli.plan_question import Request, filled_words, read_request
from meshwright.cli.plan_screen import brief_words, plan_data
from meshwright.cli.step_screen import layout_words
from meshwright.errors import InputError, Problem
from meshwright.predict.plan import Question, find_plans
from meshwright.predict.plan.curves import Point, Rate, parse_range, sensitivity, sweep, varied
from meshwright.predict.plan.front import FrontPoint, front
from meshwright.predict.plan.search import narrowed
from meshwright.spec.names import unknown_name
from meshwright.spec.units import format_count, format_seconds

THINGS = {
    "gpus": "gpus",
    "batch": "batch",
    "global-batch": "batch",
    "length": "length",
    "sequence-length": "length",
}
"""What may be swept, by the words for it."""
_TITLES = {"gpus": "GPUs", "batch": "batch", "length": "length"}
_GIB = 2.0**30
ALIKE = 0.03
"""Plans of a front whose time and memory differ by less share a line."""


def heading(question: Question, *, gpus: bool = True) -> str:
    """Name a question in a few words."""
    count = f"{question.gpus:,} × " if gpus else ""
    return f"{question.model.name} on {count}{question.cluster.gpu.title}"


def answer_sweep(args: argparse.Namespace) -> Answer:
    """Answer the same question at many values of one thing."""
    thing, values = _swept(args.sweep)
    if thing == "gpus" and args.gpus is not None:
        what = "the sweep itself says how many GPUs"
        raise InputError([Problem("--gpus", what, "leave it out")])
    request = read_request(args, gpus=values[0] if thing == "gpus" else None)
    asked = _asked(request.question, thing, values)
    with searching("sweeping", quiet=args.quiet or args.json) as (report, rename):
        points = sweep(_told(asked, thing, rename), exact=args.exact, report=report)
    views: list[View] = [
        facts(
            {
                "work": heading(request.question, gpus=thing != "gpus"),
                "layouts": _space(args),
                "costs": request.used.words,
            }
        ),
        _points(points, thing),
        *_reasons(points),
        *_filled(request, thing),
    ]
    if args.plot:
        from meshwright.cli.plan_plot import Swept, draw_scaling

        drawn = [Swept(float(p.value), p.answer.best) for p in points if p.answer is not None]
        if drawn:
            title = heading(request.question, gpus=thing != "gpus")
            draw_scaling(args.plot, title, thing, drawn, views)
            views.append(Note(f"wrote {args.plot}"))
    data = {"thing": thing, "points": [_point_data(p) for p in points], "filled": request.filled}
    quiet = tuple(f"{p.value}\t{p.tokens_per_s:.6g}" for p in points if p.tokens_per_s is not None)
    return Answer("plan.sweep/1", data, tuple(views), quiet, 0 if quiet else 1)


def _swept(text: str) -> tuple[str, tuple[int, ...]]:
    word, equals, values = text.partition("=")
    if not equals:
        what = f"{text!r} does not say what to sweep, and over what"
        raise InputError([Problem("--sweep", what, "write it like gpus=256..16384")])
    if word.strip() not in THINGS:
        raise InputError([unknown_name("thing to sweep", word.strip(), THINGS, "--sweep")])
    return THINGS[word.strip()], parse_range(values)


def _asked(question: Question, thing: str, values: Sequence[int]) -> list[tuple[int, Question]]:
    """Return the questions of a sweep, or say which values cannot be."""
    found, problems = [], list[Problem]()
    for value in values:
        try:
            found.append((value, varied(question, thing, value)))
        except InputError as error:
            problems += (problem._replace(where="--sweep") for problem in error.problems)
    if problems:
        raise InputError(problems)
    return found


def _told(
    asked: list[tuple[int, Question]], thing: str, rename: Rename
) -> Iterator[tuple[int, Question]]:
    for number, (value, question) in enumerate(asked, start=1):
        rename(f"{number} of {len(asked)}: {_TITLES[thing]} {value:,}")
        yield value, question


def _space(args: argparse.Namespace) -> str:
    if args.exact:
        return "the whole space"
    return "the usual ones; --exact searches the whole space"


def _points(points: Sequence[Point], thing: str) -> Table:
    first = next((p for p in points if p.tokens_per_s is not None), None)
    rows = [_point_row(point, thing, first) for point in points]
    scaled = ", scaling" if thing == "gpus" else ""
    numbers = f"{_TITLES[thing]}, step, tok/s{scaled}, MFU, GiB, $/T"
    return table(f"{numbers}, layout", rows, right=numbers, wide="layout")


def _point_row(point: Point, thing: str, first: Point | None) -> tuple[str, ...]:
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
        f"{plan.memory.worst.total_bytes / _GIB:.1f}",
        "" if point.dollars is None else format_count(point.dollars),
        brief_words(plan.layout),
    )


def _reasons(points: Sequence[Point]) -> list[View]:
    rows = [
        (f"{point.value:,}", problem.what, problem.fix)
        for point in points
        for problem in point.problems
    ]
    return [table("at, why none fits, try", rows, wide="why none fits, try")] if rows else []


def _filled(request: Request, thing: str = "") -> list[View]:
    swept = {"batch": "global_batch", "length": "sequence_length"}.get(thing)
    left = {name: value for name, value in request.filled.items() if name != swept}
    return [Note(filled_words(request._replace(filled=left)))] if left else []


def _point_data(point: Point) -> dict[str, Any]:
    return {
        "value": point.value,
        "exact": point.exact,
        "plan": None if point.answer is None else plan_data(point.answer.best),
        "proved": None if point.answer is None else point.answer.proved,
        "problems": [problem._asdict() for problem in point.problems],
    }


def answer_front(args: argparse.Namespace) -> Answer:
    """Answer with the plans that none beats in time, memory, price and GPUs at once."""
    counts = parse_range(args.gpus, "--gpus") if args.gpus is not None else ()
    request = read_request(args, gpus=counts[0] if counts else None)
    require_tokens(request, "--front")
    with searching("looking for the front", quiet=args.quiet or args.json):
        found = front(
            request.question, gpus=counts, exact=args.exact, reliability=reliability(args)
        )
    title = heading(request.question, gpus=len(counts) < 2)
    tokens = format_count(request.question.workload.tokens)
    views: list[View] = [
        facts(
            {
                "work": f"{title}, {tokens} tokens",
                "layouts": _space(args),
                "costs": request.used.words,
            }
        ),
        _front(found),
        *_filled(request),
    ]
    if args.plot and found:
        from meshwright.cli.plan_plot import draw_front

        draw_front(args.plot, f"{title}, {tokens} tokens", found, views)
        views.append(Note(f"wrote {args.plot}"))
    data = {"points": [_front_data(point) for point in found], "filled": request.filled}
    quiet = tuple(f"{point.gpus}\t{point.time_s:.6g}\t{point.price or 0:.6g}" for point in found)
    return Answer("plan.front/1", data, tuple(views), quiet, 0 if found else 1)


def require_tokens(request: Request, flag: str) -> None:
    """Refuse a question about a whole run whose length nobody said."""
    if not request.names_tokens:
        what = f"{flag} asks about a whole run, and nobody said how many tokens"
        raise InputError([Problem("--tokens", what, "add --tokens 15T")])


def _front(points: Sequence[FrontPoint]) -> Table:
    """Lay the front out, one line for plans that are nearly the same."""
    kept: list[FrontPoint] = []
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
            brief_words(point.plan.layout),
        )
        for point in kept
    ]
    numbers = "GPUs, time, price, GiB, step, MFU"
    title = "none beats these in time, memory, price and GPUs at once"
    if len(kept) < len(points):
        title += f" ({len(points) - len(kept)} twins left out)"
    return table(f"{numbers}, layout", rows, title, right=numbers, wide="layout")


def _alike(one: FrontPoint, other: FrontPoint) -> bool:
    return (
        one.gpus == other.gpus
        and abs(one.time_s / other.time_s - 1) < ALIKE
        and abs(one.memory_bytes / other.memory_bytes - 1) < ALIKE
    )


def _front_data(point: FrontPoint) -> dict[str, Any]:
    return {
        **plan_data(point.plan),
        "gpus": point.gpus,
        "time_s": point.time_s,
        "price": point.price,
    }


def answer_sensitivity(args: argparse.Namespace) -> Answer:
    """Answer with how the winner's figures hang on what was asked."""
    request, assumed = read_request(args), reliability(args)
    question = request.question if args.exact else narrowed(request.question)
    with searching("searching", quiet=args.quiet or args.json) as (report, rename):
        answer = find_plans(question, most=1, report=report, execute=False)
        rename("varying what was asked")
        found = sensitivity(answer, exact=args.exact, reliability=assumed, report=report)
    heads = {
        "batch": ("batch", "sequences per step"),
        "length": ("length", "sequence length, tokens per step kept"),
        "gpus": ("GPUs", "GPUs, tokens per step kept"),
        "failures": ("per year", "failures per GPU and year, failures included in the figures"),
    }
    tables = [_rates(getattr(found, name), name, *heads[name]) for name in heads]
    head = {
        "work": heading(request.question),
        "layout": layout_words(answer.best.layout),
        "layouts": _space(args),
        "costs": request.used.words,
    }
    data = {
        "plan": plan_data(answer.best),
        **{name: [_rate_data(rate) for rate in getattr(found, name)] for name in heads},
        "filled": request.filled,
    }
    quiet = tuple(
        f"{name}={rate.value}\t{rate.tokens_per_s:.6g}"
        for name in heads
        for rate in getattr(found, name)
        if rate.tokens_per_s is not None
    )
    views = (facts(head), *tables, *_filled(request))
    return Answer("plan.sensitivity/1", data, views, quiet, 0 if quiet else 1)


def _rates(rates: Sequence[Rate], name: str, column: str, title: str) -> Table:
    failures, remarks = name == "failures", any(rate.problems for rate in rates)
    rows = [
        (
            f"{rate.value * 24 * 365.25:.3g}" if failures else f"{rate.value:,}",
            "–" if rate.tokens_per_s is None else format_count(rate.tokens_per_s),
            "" if rate.mfu is None else f"{rate.mfu:.1%}",
            "" if rate.dollars is None else format_count(rate.dollars),
            *_goodput(rate, failures),
            *([rate.problems[0].what if rate.problems else ""] if remarks else []),
        )
        for rate in rates
    ]
    numbers = f"{column}, tok/s, MFU, $/T{', goodput, spares' * failures}"
    columns = f"{numbers}{', remark' * remarks}"
    return table(columns, rows, title, right=numbers, wide="remark")


def _goodput(rate: Rate, failures: bool) -> list[str]:
    if not failures:
        return []
    goodput = "" if rate.goodput is None else f"{rate.goodput:.1%}"
    return [goodput, "" if rate.spares is None else f"{rate.spares:,}"]


def _rate_data(rate: Rate) -> dict[str, Any]:
    values = {name: getattr(rate, name) for name in rate.__struct_fields__ if name != "problems"}
    return {**values, "problems": [problem._asdict() for problem in rate.problems]}
