"""`mw plan MODEL`: the fastest layout there is, proved, with why it wins and what to paste."""

import argparse
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from meshwright.cli.flags.calibration import add_calibration, add_software
from meshwright.cli.flags.long_run import add_reliability, build_long_run_views, read_reliability
from meshwright.cli.flags.work import add_work
from meshwright.cli.parser import add_common
from meshwright.cli.plan.flags import (
    PlanRequest,
    add_search_space,
    format_defaults_used,
    read_request,
)
from meshwright.cli.plan.plan_export import (
    export_framework_config,
    format_simulate_command,
    wrap_command,
)
from meshwright.cli.plan.screen import (
    ExplainedPlan,
    answer_to_data,
    make_infeasible_result,
    render_plan,
    render_search_space,
)
from meshwright.cli.plan.sweep import format_question
from meshwright.cli.render.progress import show_search_progress
from meshwright.cli.result import CommandResult, NoteView, TextView, View
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.predict.long_run.reliability import Reliability
from meshwright.predict.plan import Plan, PlanAnswer, PlanQuestion, find_plans
from meshwright.predict.plan.answer.explanation import explain_plan
from meshwright.predict.plan.framework_target import apply_framework
from meshwright.predict.plan.planner import reject_unsearched_fields
from meshwright.predict.plan.search.branch_and_bound import Report, restrict_to_common_layouts
from meshwright.predict.plan.studies.bottlenecks import find_bottlenecks
from meshwright.predict.plan.studies.pareto_front import min_bytes_needed
from meshwright.spec.units import format_count, format_seconds, parse_count

EXAMPLES = (
    "mw plan llama3.1-70b --cluster h100-superpod --gpus 1024 --tokens 15T",
    "mw plan examples/llama3-70b.toml --for megatron",
    "mw plan llama3.1-8b --cluster dgx-h100 --gpus 8 --fix tp=1,2 --precision bf16,fp8",
    "mw plan llama3.1-70b --cluster h100-superpod --sweep gpus=256..4096 --plot scaling.png",
    "mw plan llama3.1-70b --cluster h100-superpod --tokens 15T --deadline 30d",
)
COMMON_LAYOUTS_TEXT = "of the usual ones"
"""What a narrowed search says its proof is about."""
TIGHT_MEMORY_FRACTION = 0.03
"""Free share of the memory below which a plan is called tight: memory is predicted to a few per
cent (`mw validate training`)."""
_RIVALS = 12
"""Families that are found before a framework's own way to run them decides."""
_MANY = ("sweep", "front", "sensitivity", "deadline", "budget", "largest")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw plan [WORK ...] [flags]"
    add_search_space(parser)
    _add_search(parser)
    _add_many(parser)
    add_work(parser)
    add_reliability(parser)
    add_calibration(parser)
    add_software(parser)
    add_common(parser)


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the search")
    group.add_argument(
        "--top", metavar="K", default="5", help="how many families to show (default: 5)"
    )
    group.add_argument(
        "--quick", action="store_true", help="only layouts that most people would try first"
    )
    group.add_argument(
        "--beam", metavar="WIDTH",
        help="keep only so many nodes of each level of the search: sooner, and rarely proved",
    )  # fmt: skip
    group.add_argument(
        "--ray", action="store_true",
        help="search on the Ray cluster of RAY_ADDRESS, or on all cores (needs meshwright[ray])",
    )  # fmt: skip
    group.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the answer: .png, .svg or .html (needs meshwright[plots])",
    )


def _add_many(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "many questions at once", "Usual layouts only, unless --exact asks for the whole space."
    )
    group.add_argument(
        "--sweep", metavar="THING=A..B",
        help="gpus=256..16384 (doubling), batch=512,1024 or sequence-length=4Ki..64Ki",
    )  # fmt: skip
    group.add_argument(
        "--front", action="store_true",
        help="the plans that none beats in time, memory, price and GPUs at once",
    )  # fmt: skip
    group.add_argument(
        "--sensitivity", action="store_true",
        help="how the winner hangs on batch, sequence length, GPUs and failures",
    )  # fmt: skip
    group.add_argument(
        "--deadline", metavar="TIME", help="the fewest GPUs that train --tokens in so long: 30d"
    )
    group.add_argument(
        "--cheapest", action="store_true", help="with --deadline: the cheapest number of GPUs"
    )
    group.add_argument(
        "--budget", metavar="DOLLARS", help="the most tokens that so much money buys: 2M$"
    )
    group.add_argument(
        "--largest", action="store_true",
        help="the largest model of this shape that trains on these GPUs at --min-mfu",
    )  # fmt: skip
    group.add_argument("--min-mfu", metavar="SHARE", help="for --largest (default: 0.4)")
    group.add_argument(
        "--family", action="store_true",
        help="with --largest: models of the catalog's family instead of scaled ones",
    )  # fmt: skip
    group.add_argument("--exact", action="store_true", help="search the whole space each time")


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the best layouts, or one of the questions that need many searches."""
    asked_for = [name for name in _MANY if getattr(args, name)]
    beside = {"deadline", "budget"}
    if len(asked_for) > 1 and set(asked_for) != beside:
        flags = " and ".join(f"--{name}" for name in asked_for)
        raise InputError([Problem(flags, "are different questions", "ask one at a time")])
    if args.plot:
        from meshwright.cli.plan.plot import require_plot

        require_plot(args.plot)
    if asked_for:
        return _many(args, asked_for[-1])
    request, assumed = read_request(args), read_reliability(args)
    reject_unsearched_fields(request.question)
    if args.dry_run:
        return show_search_space(request)
    search, most = _searcher(args), _at_least_one(args.top, "--top")
    try:
        found = _found(request, args, search, most)
    except InputError as error:
        return make_infeasible_result(error, "plan/2")
    return show_answer(request, found, args, assumed)


def _many(args: argparse.Namespace, asked_for: str) -> CommandResult:
    """Answer a question that needs many searches."""
    if args.dry_run:
        what = "shows the space of one question, and these are many"
        raise InputError([Problem("--dry-run", what, f"leave out --{asked_for}")])
    if args.beam is not None:
        what = "is for one question, and these are many"
        raise InputError([Problem("--beam", what, f"leave out --beam or --{asked_for}")])
    if args.plot and asked_for not in ("sweep", "front"):
        what = f"--{asked_for} has no picture"
        raise InputError([Problem("--plot", what, "use it with --sweep, --front, or neither")])
    from meshwright.cli.plan import goals, sensitivity, sweep

    return {
        "sweep": sweep.answer_sweep,
        "front": sweep.run_pareto,
        "sensitivity": sensitivity.run_sensitivity,
        "deadline": goals.run_deadline,
        "budget": goals.run_budget,
        "largest": goals.run_largest_model,
    }[asked_for](args)


def show_search_space(request: PlanRequest) -> CommandResult:
    """Answer with what would be searched."""
    view = render_search_space(request)
    data = {"space": [dict(zip(view.columns, row, strict=True)) for row in view.rows]}
    return CommandResult("plan.space/1", data, (view,), tuple("=".join(row) for row in view.rows))


def _at_least_one(text: str, flag: str) -> int:
    number = parse_count(text, flag)
    if number < 1:
        raise InputError([Problem(flag, f"{number} is too few", "use 1 or more")])
    return number


SearchFunction = Callable[[PlanQuestion, int, Report | None], PlanAnswer]


def _found(
    request: PlanRequest, args: argparse.Namespace, search: SearchFunction, most: int
) -> PlanAnswer:
    """Search as the flags say, with a line on stderr that tells how far it is."""
    question = restrict_to_common_layouts(request.question) if args.quick else request.question
    with show_search_progress("searching", quiet=args.quiet or args.json) as (report, _):
        if request.target is None:
            return search(question, most, report)
        # The fastest may be another one as the framework runs it, so that more are looked at.
        answer = apply_framework(search(question, max(most, _RIVALS), report), request.target)
    return replace(answer, plans=answer.plans[:most])


def _searcher(args: argparse.Namespace) -> SearchFunction:
    """Return the search that the flags choose."""
    beam = None if args.beam is None else _at_least_one(args.beam, "--beam")
    if not args.ray:
        return lambda question, most, report: find_plans(
            question, most=most, beam=beam, report=report
        )
    if beam is not None:
        what = "is for a search in this process"
        raise InputError([Problem("--beam", what, "leave out --beam or --ray")])
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        raise MissingDependency(
            "--ray needs Ray, which is not installed",
            "pip install 'meshwright[ray]', or leave --ray out to search in this process",
        ) from None
    from meshwright.predict.plan.ray_planner import find_plans_with_ray

    return lambda question, most, report: find_plans_with_ray(question, most=most, report=report)


def show_answer(
    request: PlanRequest, found: PlanAnswer, args: argparse.Namespace, assumed: Reliability
) -> CommandResult:
    """Lay an answer out."""
    weeks, weeks_data = _weeks(request, found.best, assumed)
    among = COMMON_LAYOUTS_TEXT if args.quick else ""
    if request.target is not None:
        among = f"{among} that {request.target.name} can run".strip()
    explained = ExplainedPlan(
        found,
        explain_plan(found),
        find_bottlenecks(found),
        among,
        weeks,
        request.calibration.description,
    )
    lines = [format_simulate_command(request, plan, args) for plan in found.plans]
    views: list[View] = [*render_plan(explained), TextView(wrap_command(lines[0]))]
    settings = export_framework_config(request, found.best)
    if settings is not None:
        views.append(TextView(settings.text))
    remarks = [explained.reasons.note, *_remarks(request, found.best)]
    views += [NoteView(text) for text in remarks if text]
    if settings is not None:
        views += [NoteView(str(problem)) for problem in settings.unexpressed]
        views += [NoteView(f"assumed: {problem}") for problem in settings.assumed]
    if args.plot:
        from meshwright.cli.plan.plot import draw_plans

        draw_plans(args.plot, format_question(request.question), found.plans, views)
        views.append(NoteView(f"wrote {args.plot}"))
    data = {
        **answer_to_data(explained, lines),
        "filled": request.defaults_used,
        "long_run": weeks_data,
        "calibration": request.calibration.data,
        "framework": args.framework,
        "export": None if settings is None else {"target": args.target, "text": settings.text},
    }
    return CommandResult("plan/2", data, tuple(views), (lines[0],))


def _weeks(
    request: PlanRequest, best: Plan, assumed: Reliability
) -> tuple[str, dict[str, Any] | None]:
    """Say what all tokens take, where somebody said how many."""
    if not request.has_tokens:
        return "", None
    try:
        data = build_long_run_views(best.job, best.step.step_s, assumed).data
    except InputError as error:
        return f"cannot be predicted: {error.problems[0].what}", None
    price = data["price"]
    line = f"{format_count(request.question.workload.tokens)} tokens take "
    line += f"{format_seconds(data['calendar_s'])}, failures included"
    return line + ("" if price is None else f", and ${format_count(price)}"), data


def _remarks(request: PlanRequest, best: Plan) -> list[str]:
    found = []
    if request.defaults_used:
        found.append(format_defaults_used(request))
    for name, values in request.question.space.fixed.items():
        value = getattr(best.layout, name)
        if request.target is None and value not in values:
            found.append(f"fixing {name} did not decide: the winner has {name} {value}")
    if min_bytes_needed(best.memory) > (1 - TIGHT_MEMORY_FRACTION) * best.memory.capacity_bytes:
        found.append(
            "the memory is nearly full: --max-memory 0.95 leaves room for what is not seen"
        )
    if request.target is None:
        found.append("--for megatron prints its flags, of what it can run")
    return found
