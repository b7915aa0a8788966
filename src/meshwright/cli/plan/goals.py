"""Inverse questions of `mw plan`: GPUs for a deadline, tokens for a budget, the largest model."""

import argparse
import math
from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.cli.flags.long_run import read_reliability
from meshwright.cli.plan.flags import PlanRequest, format_defaults_used, read_request
from meshwright.cli.plan.plan_export import format_simulate_command, wrap_command
from meshwright.cli.plan.screen import format_brief_layout, make_infeasible_result, plan_to_data
from meshwright.cli.plan.sweep import require_tokens
from meshwright.cli.render.progress import show_search_progress
from meshwright.cli.render.step_screen import format_layout
from meshwright.cli.result import (
    CommandResult,
    NoteView,
    TableView,
    TextView,
    View,
    make_fields,
    make_table,
)
from meshwright.errors import InputError, Problem
from meshwright.predict.long_run.long_run import LongRun
from meshwright.predict.plan.studies.gpu_goals import (
    GoalResult,
    PlanTrial,
    find_cheapest_gpus,
    find_largest_model,
    find_max_tokens,
    find_min_gpus,
    list_family,
)
from meshwright.predict.plan.studies.sweeps import parse_range
from meshwright.spec.model import count_parameters
from meshwright.spec.serialization import encode
from meshwright.spec.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_number,
    parse_seconds,
)

MIN_MFU = 0.4
MAX_NODES = 1024
"""Nodes up to which a budget with a deadline is spent."""
_GIB = 2.0**30


def run_deadline(args: argparse.Namespace) -> CommandResult:
    """Answer with the fewest, or the cheapest, GPUs that end in time."""
    if args.gpus is not None:
        what = "--deadline finds how many GPUs it takes"
        raise InputError([Problem("--gpus", what, "leave one of them out")])
    request, assumed = _any_size(args), read_reliability(args)
    require_tokens(request, "--deadline")
    deadline_s = _positive(parse_seconds(args.deadline, "--deadline"), "--deadline", "30d")
    ask = find_cheapest_gpus if args.cheapest else find_min_gpus
    return _answered(
        args,
        request,
        lambda: ask(request.question, deadline_s, reliability=assumed, exact=args.exact),
    )


def run_budget(args: argparse.Namespace) -> CommandResult:
    """Answer with the most tokens that some money buys."""
    request, assumed = _any_size(args), read_reliability(args)
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
        lambda: find_max_tokens(
            request.question,
            dollars,
            gpus=counts,
            deadline_s=deadline_s,
            reliability=assumed,
            exact=args.exact,
        ),
    )


def run_largest_model(args: argparse.Namespace) -> CommandResult:
    """Answer with the largest model that trains at an MFU or better."""
    request, assumed = read_request(args), read_reliability(args)
    mfu = MIN_MFU if args.min_mfu is None else _share(args.min_mfu)
    models = list_family(request.question.model) if args.family else None
    return _answered(
        args,
        request,
        lambda: find_largest_model(
            request.question, mfu, models=models, reliability=assumed, exact=args.exact
        ),
    )


def _any_size(args: argparse.Namespace) -> PlanRequest:
    """Read a question whose number of GPUs may be what is asked for."""
    if args.gpus is not None:
        return read_request(args, gpus=parse_range(args.gpus, "--gpus")[0])
    return read_request(args, any_size=True)


def _counts(args: argparse.Namespace, request: PlanRequest) -> tuple[int, ...]:
    """Return the numbers of GPUs that a budget may be spent on."""
    if args.gpus is not None:
        return parse_range(args.gpus, "--gpus")
    cluster = request.question.cluster
    if args.deadline is None and "gpus" not in request.work.origins:
        what = "needs --gpus or --deadline"
        raise InputError([Problem("--budget", what, "add --gpus 64..1024 or --deadline 90d")])
    if args.deadline is None:
        return (request.question.gpus,)
    most = min(cluster.max_nodes or MAX_NODES, MAX_NODES)
    doubled = (2**power for power in range(MAX_NODES.bit_length()))
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


def _answered(
    args: argparse.Namespace, request: PlanRequest, ask: Callable[[], GoalResult]
) -> CommandResult:
    try:
        with show_search_progress("trying", quiet=args.quiet or args.json):
            reached = ask()
    except InputError as error:
        return make_infeasible_result(_flagged(error), "plan.goal/1")
    best = reached.best
    whole = not args.largest or request.has_tokens
    views: list[View] = [
        _summary(reached, whole, request.calibration.description),
        _tried(reached, whole),
    ]
    line = None
    if best.answer is not None:
        there = request._replace(question=best.answer.question)
        if best.answer.question.model == request.work.work.model or args.family:
            line = format_simulate_command(there, best.answer.best, args)
            views.append(TextView(wrap_command(line)))
        else:
            views.append(NoteView("the scaled model is in no catalog: --json has it in full"))
    views.append(NoteView(reached.note))
    if request.defaults_used:
        views.append(NoteView(format_defaults_used(request)))
    data = {
        "asked": reached.question,
        "best": _trial_data(best),
        "tried": [_trial_data(trial) for trial in reached.trials],
        "note": reached.note,
        "model": None if best.answer is None else encode(best.answer.question.model),
        "command": line,
        "filled": request.defaults_used,
    }
    quiet = str(best.tokens if args.budget else best.gpus)
    if args.largest:
        quiet = best.model
    return CommandResult("plan.goal/1", data, tuple(views), (quiet,))


_FLAGS = {"deadline": "--deadline", "budget": "--budget", "mfu": "--min-mfu"}


def _flagged(error: InputError) -> InputError:
    return InputError(p._replace(where=_FLAGS.get(p.where, p.where)) for p in error.problems)


def _summary(reached: GoalResult, whole: bool, costs: str) -> View:
    """Say what was reached; the `whole` run only where its tokens are known."""
    best, run = reached.best, reached.best.long_run
    answer = best.answer
    assert answer is not None
    plan = answer.best
    size = count_parameters(answer.question.model).total
    step, worst = plan.step, plan.memory.worst_stage
    return make_fields(
        {
            "asked": reached.question,
            "model": f"{best.model}, {format_count(size)} parameters",
            "GPUs": f"{best.gpus:,} × {plan.job.cluster.gpu.title}",
            "tokens": format_count(best.tokens) if whole else None,
            "layout": format_layout(plan.layout),
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


def _tried(reached: GoalResult, whole: bool) -> TableView:
    """Return everything that was looked at, with columns only for what changes."""
    models = len({trial.model for trial in reached.trials}) > 1
    tokens = len({trial.tokens for trial in reached.trials}) > 1
    rows = []
    for trial in sorted(reached.trials, key=lambda trial: (trial.gpus, trial.tokens)):
        run, plan = trial.long_run, None if trial.answer is None else trial.answer.best
        rows.append(
            (
                "*" if trial == reached.best else "",
                f"{trial.gpus:,}",
                *([trial.model] if models else []),
                *([format_count(trial.tokens)] if tokens else []),
                *(_run_cells(run) if whole else ()),
                "" if plan is None else f"{plan.step.mfu:.1%}",
                "" if plan is None else f"{plan.memory.worst_stage.total_bytes / _GIB:.1f}",
                format_brief_layout(plan.layout) if plan is not None else _why(trial),
            )
        )
    cells = f"{', model' * models}{', tokens' * tokens}{', time, price' * whole}"
    numbers = f"GPUs{cells}, MFU, GiB"
    return make_table(
        f" , {numbers}, layout", rows, "what was tried (* the answer)",
        right=numbers.replace("model, ", ""), wide="layout",
    )  # fmt: skip


def _run_cells(run: LongRun | None) -> tuple[str, str]:
    if run is None:
        return "–", ""
    price = "" if run.price is None else f"${format_count(run.price)}"
    return format_seconds(run.calendar_s), price


def _why(trial: PlanTrial) -> str:
    return trial.problems[0].what if trial.problems else ""


def _trial_data(trial: PlanTrial) -> dict[str, Any]:
    run = None if trial.long_run is None else msgspec.to_builtins(trial.long_run)
    if run is not None and math.isinf(run["mtbf_s"]):
        run["mtbf_s"] = None  # JSON has no infinity
    return {
        "gpus": trial.gpus,
        "model": trial.model,
        "tokens": trial.tokens,
        "plan": None if trial.answer is None else plan_to_data(trial.answer.best),
        "long_run": run,
        "problems": [problem._asdict() for problem in trial.problems],
    }
