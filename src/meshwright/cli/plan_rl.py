"""`mw plan rl MODEL`: who generates, who trains and how far apart, for the shortest steps."""

import argparse
import sys
from typing import Any

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.calibrations import Used, add_calibration, used_for
from meshwright.cli.loop_described import describe, names_loop
from meshwright.cli.parser import add_common
from meshwright.cli.rl_flags import (
    adapter_remarks,
    add_rounds,
    gpus_words,
    outcome_data,
    rounds_of,
    rounds_remarks,
    setup_data,
    too_full,
    trainer_fixed,
)
from meshwright.cli.serve_flags import add_served, cluster_of, engine_of, model_of
from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import PLACEMENTS, Placement
from meshwright.predict.rl.planning import Answer as Found
from meshwright.predict.rl.planning import Planned, Question, plan_rl
from meshwright.predict.rl.setup import share_of
from meshwright.predict.serving.formats import Formats
from meshwright.spec.bounds import require, whole
from meshwright.spec.names import unknown_name
from meshwright.spec.units import format_seconds, format_some, parse_count

EXAMPLES = (
    "mw plan rl llama3.1-8b --cluster h100-superpod --gpus 16",
    "mw plan rl qwen3-30b-a3b --cluster h100-superpod --gpus 32 --placement asynchronous "
    "--max-staleness 4 --output lognormal:4000:0.8",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw plan rl MODEL --cluster NAME --gpus N [flags]"
    add_served(parser, also="; or a loop: its task, file of settings, or run")
    group = parser.add_argument_group("the search")
    group.add_argument("--gpus", metavar="N", help="of both sides together, all of them used")
    group.add_argument(
        "--placement", metavar="WORD,…", help=f"only these of {', '.join(PLACEMENTS)}"
    )
    group.add_argument(
        "--max-staleness", metavar="N", default="1", help="of asynchronous (default: 1)"
    )
    group.add_argument("--tp", metavar="N,…", help="only these sizes of an engine")
    group.add_argument("--top", metavar="K", default="8", help="plans to show (default: 8)")
    add_rounds(parser)
    add_calibration(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the shortest steps."""
    top = parse_count(args.top, "--top")
    require(whole("--top", top))
    question = question_of(args)
    used = used_for(args, question.cluster.gpu)
    watched = sys.stderr.isatty() and not (args.quiet or args.json)

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    found = plan_rl(question, most=top, report=show if watched else None)
    if watched:
        show("")
    best = found.plans[0]
    remarks = [
        *rounds_remarks(question.rounds),
        *adapter_remarks(best.setup),
        *too_full(best.setup, best.outcome),
    ]
    data = {
        "plans": [_data(one) for one in found.plans[:top]],
        "refused": found.refused,
        "simulations": found.simulations,
        "calibration": used.data,
        "remarks": [*([f"times are {used.rough}"] if used.rough else []), *remarks],
    }
    quiet = f"{best.setup.placement}: {gpus_words(best.setup)}"
    views = (*_screen(found, top, used), *map(Note, remarks))
    return Answer("plan.rl/1", data, views, (quiet,))


def question_of(args: argparse.Namespace) -> Question:
    """Return the question that the flags ask."""
    if args.gpus is None:
        raise InputError([Problem("--gpus", "how many GPUs are there?", "add --gpus 16, say")])
    gpus = parse_count(args.gpus, "--gpus")
    staleness = parse_count(args.max_staleness, "--max-staleness")
    require(whole("--gpus", gpus, most=65_536), whole("--max-staleness", staleness, 0, 1000))
    given: dict[str, Any] = {}
    if args.tp is not None:
        given["degrees"] = tuple(parse_count(word, "--tp") for word in args.tp.split(","))
        require(*(whole("--tp", one, most=64) for one in given["degrees"]))
    if args.placement is not None:
        given["placements"] = tuple(_placement(word) for word in args.placement.split(","))
    loop = describe(args.model) if names_loop(args.model) else None
    cluster = share_of(cluster_of(args), gpus)
    return Question(
        model=model_of(args) if loop is None else loop.model,
        cluster=cluster,
        rounds=rounds_of(args, None if loop is None else loop.rounds),
        max_staleness=staleness,
        formats=Formats(weights=args.precision, kv=args.kv),
        engine=engine_of(args),
        calibration=used_for(args, cluster.gpu).calibration,
        fixed=trainer_fixed(args),
        **given,
    )


def _placement(word: str) -> Placement:
    for one in PLACEMENTS:
        if one == word.strip():
            return one
    raise InputError([unknown_name("placement", word, list(PLACEMENTS), "--placement")])


def _data(plan: Planned) -> dict[str, Any]:
    return {"setup": setup_data(plan.setup), "outcome": outcome_data(plan.outcome)}


def _screen(found: Found, top: int, used: Used) -> tuple[View, ...]:
    best = found.plans[0]
    exact = [one for one in found.plans if not one.setup.arrangement.max_staleness]
    why = "nothing synchronous was looked at"
    if exact and exact[0] is best:
        why = "no other placement has shorter steps, and nothing is stale"
    elif exact:
        gained = exact[0].outcome.step_s / best.outcome.step_s
        why = f"{gained:.2f} times as fast as the best synchronous one, {exact[0].setup.placement}"
    said = {
        "plan": f"{best.setup.placement}, {gpus_words(best.setup)}",
        "step": f"{format_seconds(best.outcome.step_s)}, "
        f"{best.outcome.tokens_per_s_per_gpu:,.0f} tokens/s of a GPU",
        "why": why,
        "searched": f"{format_some(found.simulations, 'simulation')}; "
        f"{format_some(len(found.refused), 'setup')} cannot do",
        "costs": used.words,
        "times": used.rough,
    }
    rows = [
        (
            one.setup.placement,
            one.setup.engines.replica.layout.tp,
            "all" if one.setup.placement == "colocated" else one.outcome.rollout_gpus,
            one.outcome.training_gpus,
            format_seconds(one.outcome.step_s),
            f"{one.outcome.tokens_per_s_per_gpu:,.0f}",
            f"{one.outcome.bubble:.0%}",
            f"{one.outcome.staleness:.2g}",
        )
        for one in found.plans[:top]
    ]
    columns = "placement, tp, generate, train, step, tokens/s, bubble, stale"
    right = "tp, generate, train, step, tokens/s, bubble, stale"
    return facts(said), table(columns, rows, right=right)
