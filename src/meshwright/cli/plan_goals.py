"""Inverse questions of `mw plan`: GPUs for a deadline, tokens for a budget, the largest model."""

import argparse
import math
from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.cli.answer import Answer, Note, Table, Text, View, facts, table
from meshwright.cli.long_run import reliability
from meshwright.cli.plan_curves import require_tokens
from meshwright.cli.plan_paste import command, folded
from meshwright.cli.plan_progress import searching
from meshwright.cli.plan_question import Request, filled_words, read_request
from meshwright.cli.plan_screen import brief_words, plan_data, unfit
from meshwright.cli.step_screen import layout_words
from meshwright.errors import InputError, Problem
from meshwright.predict.long_run import LongRun
from meshwright.predict.plan.curves import parse_range
from meshwright.predict.plan.goals import (
    Reached,
    Trial,
    cheapest_gpus,
    family,
    fewest_gpus,
    largest_model,
    most_tokens,
)
from meshwright.spec.model import count_parameters
from meshwright.spec.read import plain
from meshwright.spec.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_number,
    parse_seconds,
)

MIN_MFU = 0.4
MOST_NODES = 1024
"""Nodes up to which a budget with a deadline is spent."""
_GIB = 2.0**30


def answer_deadline(args: argparse.Namespace) -> Answer:
    """Answer with the fewest, or the cheapest, GPUs that end in time."""
    if args.gpus is not None:
        what = "--deadline finds how many GPUs it takes"
        raise InputError([Problem("--gpus", what, "leave one of them out")])
    request, assumed = _any_size(args), reliability(args)
    require_tokens(request, "--deadline")
    deadline_s = _positive(parse_seconds(args.deadline, "--deadline"), "--deadline", "30d")
    ask = cheapest_gpus if args.cheapest else fewest_gpus
    return _answered(
        args,
        request,
        lambda: ask(request.question, deadline_s, reliability=assumed, exact=args.exact),
    )


def answer_budget(args: argparse.Namespace) -> Answer:
    """Answer with the most tokens that some money buys."""
    request, assumed = _any_size(args), reliability(args)
    counts = _counts(args, request)
    if request.question.cluster.price_per_gpu_hour is None:
        what = f"{request.question.cluster.name} has no price"
        raise InputError([Problem("--budget", what, "add price_per_gpu_hour to its file")])
    dollars = _dollars(args.budget)
    deadline_s = None
    if args.deadline is not None:
        deadline_s = _positive(parse_seconds(args.deadline, "--deadline"), "--deadline", "30d")
    return _answered(
        args,
        request,
        lambda: most_tokens(
            request.question,
            dollars,
            gpus=counts,
            deadline_s=deadline_s,
            reliability=assumed,
            exact=args.exact,
        ),
    )


def answer_largest(args: argparse.Namespace) -> Answer:
    """Answer with the largest model that trains at an MFU or better."""
    request, assumed = read_request(args), reliability(args)
    mfu = MIN_MFU if args.min_mfu is None else _share(args.min_mfu)
    models = family(request.question.model) if args.family else None
    return _answered(
        args,
        request,
        lambda: largest_model(
            request.question, mfu, models=models, reliability=assumed, exact=args.exact
        ),
    )


def _any_size(args: argparse.Namespace) -> Request:
    """Read a question whose number of GPUs may be what is asked for."""
    if args.gpus is not None:
        return read_request(args, gpus=parse_range(args.gpus, "--gpus")[0])
    return read_request(args, any_size=True)


def _counts(args: argparse.Namespace, request: Request) -> tuple[int, ...]:
    """Return the numbers of GPUs that a budget may be spent on."""
    if args.gpus is not None:
        return parse_range(args.gpus, "--gpus")
    cluster = request.question.cluster
    if args.deadline is None and "gpus" not in request.asked.origins:
        what = "the fewer GPUs, the more tokens for the money: say how many, or by when"
        raise InputError([Problem("--budget", what, "add --gpus 64..1024 or --deadline 90d")])
    if args.deadline is None:
        return (request.question.gpus,)
    most = min(cluster.max_nodes or MOST_NODES, MOST_NODES)
    doubled = (2**power for power in range(MOST_NODES.bit_length()))
    return tuple(nodes * cluster.gpus_per_node for nodes in doubled if nodes <= most)


def _dollars(text: str) -> float:
    number = parse_number(text.replace("$", "").strip(), "--budget")
    return _positive(number, "--budget", "2M$")


def _positive(value: float, flag: str, example: str) -> float:
    if not value > 0 or not math.isfinite(value):
        raise InputError([Problem(flag, f"{value:g} is not above 0", f"write it like {example}")])
    return value


def _share(text: str) -> float:
    percent = text.strip().endswith("%")
    value = parse_number(text.strip().removesuffix("%"), "--min-mfu") / (100 if percent else 1)
    if not 0 < value < 1:
        what = f"{text} is not a share of the peak"
        raise InputError([Problem("--min-mfu", what, "write it like 0.4 or 40%")])
    return value


def _answered(args: argparse.Namespace, request: Request, ask: Callable[[], Reached]) -> Answer:
    try:
        with searching("trying", quiet=args.quiet or args.json):
            reached = ask()
    except InputError as error:
        return unfit(_flagged(error), "plan.goal/1")
    best = reached.best
    whole = not args.largest or request.names_tokens
    views: list[View] = [_summary(reached, whole, request.used.words), _tried(reached, whole)]
    line = None
    if best.answer is not None:
        there = request._replace(question=best.answer.question)
        if best.answer.question.model == request.asked.work.model or args.family:
            line = command(there, best.answer.best, args)
            views.append(Text(folded(line)))
        else:
            views.append(Note("the scaled model is in no catalog: --json has it in full"))
    views.append(Note(reached.note))
    if request.filled:
        views.append(Note(filled_words(request)))
    data = {
        "asked": reached.asked,
        "best": _trial_data(best),
        "tried": [_trial_data(trial) for trial in reached.tried],
        "note": reached.note,
        "model": None if best.answer is None else plain(best.answer.question.model),
        "command": line,
        "filled": request.filled,
    }
    quiet = str(best.tokens if args.budget else best.gpus)
    if args.largest:
        quiet = best.model
    return Answer("plan.goal/1", data, tuple(views), (quiet,))


_FLAGS = {"deadline": "--deadline", "budget": "--budget", "mfu": "--min-mfu"}


def _flagged(error: InputError) -> InputError:
    return InputError(p._replace(where=_FLAGS.get(p.where, p.where)) for p in error.problems)


def _summary(reached: Reached, whole: bool, costs: str) -> View:
    """Say what was reached; the `whole` run only where its tokens are known."""
    best, run = reached.best, reached.best.run
    answer = best.answer
    assert answer is not None
    plan = answer.best
    size = count_parameters(answer.question.model).total
    step, worst = plan.step, plan.memory.worst
    return facts(
        {
            "asked": reached.asked,
            "model": f"{best.model}, {format_count(size)} parameters",
            "GPUs": f"{best.gpus:,} × {plan.work.cluster.gpu.title}",
            "tokens": format_count(best.tokens) if whole else None,
            "layout": layout_words(plan.layout),
            "step": f"{format_seconds(step.step_s)} ({format_seconds(step.low_s)} to "
            f"{format_seconds(step.high_s)}), MFU {step.mfu:.1%}",
            "memory": f"{format_bytes(worst.total_bytes)} of "
            f"{format_bytes(plan.memory.capacity_bytes)}",
            "whole run": _run_words(run) if run is not None and whole else None,
            "costs": costs,
        }
    )


def _run_words(run: LongRun) -> str:
    price = "" if run.price is None else f", ${format_count(run.price)}"
    return f"{format_seconds(run.calendar_s)}, failures included ({run.goodput:.1%} goodput){price}"


def _tried(reached: Reached, whole: bool) -> Table:
    """Return everything that was looked at, with columns only for what changes."""
    models = len({trial.model for trial in reached.tried}) > 1
    tokens = len({trial.tokens for trial in reached.tried}) > 1
    rows = []
    for trial in sorted(reached.tried, key=lambda trial: (trial.gpus, trial.tokens)):
        run, plan = trial.run, None if trial.answer is None else trial.answer.best
        rows.append(
            (
                "*" if trial == reached.best else "",
                f"{trial.gpus:,}",
                *([trial.model] if models else []),
                *([format_count(trial.tokens)] if tokens else []),
                *(_run_cells(run) if whole else ()),
                "" if plan is None else f"{plan.step.mfu:.1%}",
                "" if plan is None else f"{plan.memory.worst.total_bytes / _GIB:.1f}",
                brief_words(plan.layout) if plan is not None else _why(trial),
            )
        )
    cells = f"{', model' * models}{', tokens' * tokens}{', time, price' * whole}"
    numbers = f"GPUs{cells}, MFU, GiB"
    return table(
        f" , {numbers}, layout", rows, "what was tried (* the answer)",
        right=numbers.replace("model, ", ""), wide="layout",
    )  # fmt: skip


def _run_cells(run: LongRun | None) -> tuple[str, str]:
    if run is None:
        return "–", ""
    price = "" if run.price is None else f"${format_count(run.price)}"
    return format_seconds(run.calendar_s), price


def _why(trial: Trial) -> str:
    return trial.problems[0].what if trial.problems else ""


def _trial_data(trial: Trial) -> dict[str, Any]:
    run = None if trial.run is None else msgspec.to_builtins(trial.run)
    if run is not None and math.isinf(run["mtbf_s"]):
        run["mtbf_s"] = None  # JSON has no infinity
    return {
        "gpus": trial.gpus,
        "model": trial.model,
        "tokens": trial.tokens,
        "plan": None if trial.answer is None else plan_data(trial.answer.best),
        "long_run": run,
        "problems": [problem._asdict() for problem in trial.problems],
    }
