"""`mw plan rl MODEL`: who generates, who trains and how far apart, for the shortest steps."""

import argparse
from typing import Any

from meshwright.cli.flags.calibration import CalibrationChoice, add_calibration, choose_calibration
from meshwright.cli.flags.rl import (
    add_rollout_flags,
    find_memory_overflows,
    format_gpu_roles,
    list_adapter_notes,
    list_rollout_notes,
    outcome_to_data,
    read_rollouts,
    read_trainer_constraints,
    setup_to_data,
)
from meshwright.cli.flags.rl_run import is_rl_run, read_rl_run
from meshwright.cli.flags.served_model import (
    add_served_model,
    find_engine,
    read_served_cluster,
    read_served_model,
)
from meshwright.cli.parser import add_common
from meshwright.cli.render.progress import ProgressLine
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import PLACEMENTS, Placement
from meshwright.predict.rl.rl_search import RLAnswer, RLPlan, RLQuestion, plan_rl
from meshwright.predict.rl.rl_setup import take_gpu_share
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import format_quantity, format_seconds, parse_count

EXAMPLES = (
    "mw plan rl llama3.1-8b --cluster h100-superpod --gpus 16",
    "mw plan rl qwen3-30b-a3b --cluster h100-superpod --gpus 32 --placement async "
    "--max-staleness 4 --output lognormal:4000:0.8",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw plan rl MODEL --cluster NAME --gpus N [flags]"
    add_served_model(parser, also="; or a loop: its task, file of settings, or run")
    group = parser.add_argument_group("the search")
    group.add_argument("--gpus", metavar="N", help="of both sides together, all of them used")
    group.add_argument(
        "--placement", metavar="WORD,…", help=f"only these of {', '.join(PLACEMENTS)}"
    )
    group.add_argument("--max-staleness", metavar="N", default="1", help="of async (default: 1)")
    group.add_argument("--tp", metavar="N,…", help="only these sizes of an engine")
    group.add_argument("--top", metavar="K", default="8", help="plans to show (default: 8)")
    add_rollout_flags(parser)
    add_calibration(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the shortest steps."""
    top = parse_count(args.top, "--top")
    raise_problems(check_integer("--top", top))
    question = read_question(args)
    used = choose_calibration(args, question.cluster.gpu)
    with ProgressLine(quiet=args.quiet or args.json) as line:
        found = plan_rl(question, most=top, report=line.show)
    best = found.plans[0]
    remarks = [
        *list_rollout_notes(question.rollout_batch),
        *list_adapter_notes(best.setup),
        *find_memory_overflows(best.setup, best.metrics),
    ]
    data = {
        "plans": [_data(one) for one in found.plans[:top]],
        "infeasible": found.infeasible,
        "simulations": found.simulations,
        "calibration": used.data,
        "remarks": [*([f"times are {used.accuracy_note}"] if used.accuracy_note else []), *remarks],
    }
    quiet = f"{best.setup.placement}: {format_gpu_roles(best.setup)}"
    views = (*_screen(found, top, used), *map(NoteView, remarks))
    return CommandResult("plan.rl/2", data, views, (quiet,))


def read_question(args: argparse.Namespace) -> RLQuestion:
    """Return the question that the flags ask."""
    if args.gpus is None:
        raise InputError([Problem("--gpus", "how many GPUs are there?", "add --gpus 16, say")])
    gpus = parse_count(args.gpus, "--gpus")
    staleness = parse_count(args.max_staleness, "--max-staleness")
    raise_problems(
        check_integer("--gpus", gpus, most=65_536),
        check_integer("--max-staleness", staleness, 0, 1000),
    )
    given: dict[str, Any] = {}
    if args.tp is not None:
        given["engine_tp_degrees"] = tuple(parse_count(word, "--tp") for word in args.tp.split(","))
        raise_problems(*(check_integer("--tp", one, most=64) for one in given["engine_tp_degrees"]))
    if args.placement is not None:
        given["placements"] = tuple(_placement(word) for word in args.placement.split(","))
    loop = read_rl_run(args.model) if is_rl_run(args.model) else None
    cluster = take_gpu_share(read_served_cluster(args), gpus)
    return RLQuestion(
        model=read_served_model(args) if loop is None else loop.model,
        cluster=cluster,
        rollout_batch=read_rollouts(args, None if loop is None else loop.rollout_parameters),
        max_staleness=staleness,
        quantization=Quantization(weights=args.precision, kv=args.kv_cache_dtype),
        engine=find_engine(args),
        calibration=choose_calibration(args, cluster.gpu).calibration,
        fixed_fields=read_trainer_constraints(args),
        **given,
    )


def _placement(word: str) -> Placement:
    for one in PLACEMENTS:
        if one == word.strip():
            return one
    raise InputError(
        [build_unknown_name_problem("placement", word, list(PLACEMENTS), "--placement")]
    )


def _data(plan: RLPlan) -> dict[str, Any]:
    return {"setup": setup_to_data(plan.setup), "outcome": outcome_to_data(plan.metrics)}


def _screen(found: RLAnswer, top: int, used: CalibrationChoice) -> tuple[View, ...]:
    best = found.plans[0]
    exact = [one for one in found.plans if not one.setup.rollout_policy.max_staleness]
    why = "nothing synchronous was looked at"
    if exact and exact[0] is best:
        why = "no other placement has shorter steps, and nothing is stale"
    elif exact:
        gained = exact[0].metrics.step_s / best.metrics.step_s
        why = f"{gained:.2f} times as fast as the best synchronous one, {exact[0].setup.placement}"
    said = {
        "plan": f"{best.setup.placement}, {format_gpu_roles(best.setup)}",
        "step": f"{format_seconds(best.metrics.step_s)}, "
        f"{best.metrics.tokens_per_s_per_gpu:,.0f} tokens/s of a GPU",
        "why": why,
        "searched": f"{format_quantity(found.simulations, 'simulation')}; "
        f"{format_quantity(len(found.infeasible), 'setup')} infeasible",
        "costs": used.description,
        "times": used.accuracy_note,
    }
    rows = [
        (
            one.setup.placement,
            one.setup.rollout_pool.replica.layout.tp,
            "all" if one.setup.placement == "colocated" else one.metrics.rollout_gpus,
            one.metrics.training_gpus,
            format_seconds(one.metrics.step_s),
            f"{one.metrics.tokens_per_s_per_gpu:,.0f}",
            f"{one.metrics.bubble:.0%}",
            f"{one.metrics.mean_staleness:.2g}",
        )
        for one in found.plans[:top]
    ]
    columns = "placement, tp, generate, train, step, tokens/s, bubble, stale"
    right = "tp, generate, train, step, tokens/s, bubble, stale"
    return make_fields(said), make_table(columns, rows, right=right)
