"""`mw plan serve MODEL`: the cheapest way to serve requests in time, and what binds it."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.answer import Answer, Note, Text, View, facts, table
from meshwright.cli.parser import add_common
from meshwright.cli.request_flags import ALL_AT_ONCE, add_request_flags
from meshwright.cli.serve_flags import (
    DEGREES,
    ENGINE_NAMES,
    add_served,
    cluster_of,
    engine_of,
    model_of,
)
from meshwright.cli.serve_screen import (
    engines_words,
    layout_words,
    limits_words,
    objective_words,
)
from meshwright.cli.simulate_serve import (
    COUNT,
    add_objective,
    attain_of,
    context_notes,
    drawn,
    fleet_data,
    sized_streams,
    within_context,
)
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.serving.figures import parse_objective
from meshwright.policy.routing import ROUTINGS
from meshwright.predict.serving.engine_flags import TARGETS, Target, command_lines
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.planned import ServingAnswer, ServingPlan, ServingQuestion
from meshwright.predict.serving.planning import RIVALS, plan_serving
from meshwright.predict.serving.shapes import Space
from meshwright.spec.bounds import require, whole
from meshwright.spec.units import format_count, format_seconds, format_some, parse_count

EXAMPLES = (
    "mw plan serve llama3.1-8b --cluster h200-superpod --rate 20 --prompt 500 --output 200 "
    "--slo ttft=500ms,itl=30ms",
    "mw plan serve llama3.1-70b --cluster h100-superpod --gpus 32 --precision fp8 "
    "--trace requests.jsonl --slo ttft=1s,itl=50ms --for vllm",
)
_MOST_SHOWN = 6
_NARROWER = {
    "fp32": "bf16", "bf16": "fp8", "fp16": "fp8", "fp8": "int4", "fp8-blockwise": "int4",
    "int8": "int4",
}  # fmt: skip
"""What takes fewer bits than a format of weights, where anything does."""
_WHOSE: dict[Target, tuple[str, ...]] = {
    "meshwright": ("meshwright",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "tensorrt-llm": ("tensorrt-llm-pytorch", "tensorrt-llm"),
}
"""Engines that a target's command lines start; the first is the one that they start by default."""
_FOLDER = "MODEL_DIR"
"""Stands in command lines for a model that was described without its weights."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw plan serve MODEL --cluster NAME --slo NAME=TIME,… [requests] [flags]"
    add_served(parser, engine="that of --for, or vllm")
    judged = parser.add_argument_group("what is asked of it")
    add_objective(judged)
    judged.add_argument("--gpus", metavar="N", default="64", help="as many at most (default: 64)")
    add_request_flags(parser, count=COUNT, one_rate=True)
    group = parser.add_argument_group("the search")
    for name in DEGREES:
        group.add_argument(f"--{name}", metavar="N,…", help=f"only these values of {name}")
    group.add_argument(
        "--together", action="store_true", help="no engines that only compute prompts"
    )
    group.add_argument(
        "--routing", choices=ROUTINGS, default="least-loaded", metavar="WORD",
        help=f"{', '.join(ROUTINGS)} (default: least-loaded)",
    )  # fmt: skip
    group.add_argument("--top", metavar="K", default="5", help="plans to show (default: 5)")
    group.add_argument(
        "--for", dest="target", choices=TARGETS, metavar="NAME",
        help=f"plan what it can run, and print the command lines: {', '.join(TARGETS)}",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the cheapest plans."""
    said = args.engine is not None or args.target is not None
    args.engine = _engine_name(args)
    (question, beyond), top = _question(args), parse_count(args.top, "--top")
    require(whole("--top", top))
    with _Watching(quiet=args.quiet or args.json) as watching:
        found = plan_serving(question, most=top, report=watching.show)
    left_out = context_notes(beyond, question.model)
    times = f"{question.engine.name}'s" + ("" if said else ": neither --for nor --engine is given")
    data: dict[str, Any] = {
        "beyond_context": beyond,
        "objective": question.objective,
        "attain": question.attain,
        "engine": question.engine.name,
        "plans": [_data(plan) for plan in found.plans],
        "refused": found.refused,
        "beaten": found.beaten,
        "simulations": found.simulations,
        "fewer": None if found.fewer is None else _data(found.fewer),
        "nearest": None if found.nearest is None else _data(found.nearest),
    }
    if not found.plans:
        return Answer("plan.serve/1", data, (*_nothing(question, found, times), *left_out), (), 1)
    target: Target = args.target or _own_target(args.engine)
    is_folder = Path(args.model).is_dir()
    exported = command_lines(found.plans[0].fleet, target, args.model if is_folder else _FOLDER)
    notes = exported.notes if is_folder else (_stands_for(args.model, target), *exported.notes)
    if not exported.lines:
        notes = exported.notes
    data["commands"] = {
        "target": target, "lines": exported.lines, "starts": exported.starts, "notes": notes
    }  # fmt: skip
    views = [*_screen(question, found, times), *left_out]
    if args.target:
        views.append(Text("\n".join(exported.lines)))
        views += [Note(note) for note in notes]
    elif exported.lines:
        views.append(Note(f"--for {target} prints its command lines"))
    else:
        views.append(Note(f"{notes[0]}; --for {target} looks for a plan that it can run"))
    best = found.plans[0].fleet
    quiet = f"{format_some(best.gpus, 'GPU')}: {engines_words(best)}"
    return Answer("plan.serve/1", data, tuple(views), (quiet,))


def _question(args: argparse.Namespace) -> tuple[ServingQuestion, int]:
    """Return what is asked, and how many requests no engine would take."""
    if args.slo is None:
        fix = "say what requests are held to: --slo ttft=500ms,itl=40ms"
        raise InputError([Problem("--slo", "in time, which is what?", fix)])
    gpus = parse_count(args.gpus, "--gpus")
    require(whole("--gpus", gpus, most=4096))
    streams = sized_streams(args)
    if len(streams) > 1 or streams[0].in_flight is not None:
        what = "a plan is for one stream of requests that arrive by themselves"
        raise InputError([Problem("--rate", what, "give one rate, or a trace with times")])
    if streams[0].rate_per_s == ALL_AT_ONCE:
        what = "requests that are all there at once have no rate that engines could keep up with"
        fix = "give a rate; mw simulate serve --rate inf says how long they take"
        raise InputError([Problem("--rate", what, fix)])
    space = Space(**{name: _values(args, name) for name in DEGREES})
    model = model_of(args)
    requests, beyond = within_context(drawn(streams[0]), model, args)
    question = ServingQuestion(
        model=model,
        cluster=cluster_of(args, gpus),
        requests=tuple(requests),
        objective=dict(parse_objective(args.slo, "--slo")),
        attain=attain_of(args),
        most_gpus=gpus,
        formats=Formats(weights=args.precision, kv=args.kv),
        engine=engine_of(args),
        routing=args.routing,
        space=space,
        apart=not args.together,
        target=args.target,
    )
    return question, beyond


def _values(args: argparse.Namespace, name: str) -> tuple[int, ...] | None:
    text = getattr(args, name)
    if text is None:
        return None
    found = tuple(parse_count(word, f"--{name}") for word in text.split(",") if word.strip())
    require(*(whole(f"--{name}", value, most=4096) for value in found))
    return found or None


def _engine_name(args: argparse.Namespace) -> str:
    """Return whose times count: the engine's that is named, or that the command lines start."""
    target: Target | None = args.target
    if args.engine is None:
        return "vllm" if target is None else _WHOSE[target][0]
    engine = engine_of(args)
    if target is not None and engine not in (ENGINE_NAMES[name] for name in _WHOSE[target]):
        what = f"command lines are for {target}, and times would be those of {engine.name}"
        fix = f"leave it out, or use --engine {_WHOSE[target][0]}"
        raise InputError([Problem("--engine", what, fix)])
    named: str = args.engine
    return named


def _own_target(engine: str) -> Target:
    return next(target for target, names in _WHOSE.items() if engine.lower() in names)


def _stands_for(model: str, target: Target) -> str:
    also = "" if target == "meshwright" else ", or for their name on Hugging Face"
    return f"{_FOLDER} stands for the folder with the weights of {model}{also}"


def _data(plan: ServingPlan) -> dict[str, Any]:
    return {"fleet": fleet_data(plan.fleet), "outcome": msgspec.to_builtins(plan.outcome)}


def _screen(question: ServingQuestion, found: ServingAnswer, times: str) -> tuple[View, ...]:
    best = found.plans[0]
    replica, limits = best.fleet.serving.replica, best.fleet.serving.limits
    price = best.fleet.dollars_per_hour
    said = {
        "plan": f"{best.fleet.gpus} × {replica.cluster.gpu.name}: {engines_words(best.fleet)}",
        "limits": limits_words(limits),
        "times": times,
        "objective": objective_words(question.objective, best.outcome, question.attain),
        "cost": "" if price is None else f"${price:,.2f} an hour, "
        f"${best.outcome.dollars_per_million_tokens:.3g} for a million tokens of answers",
        "why": why(question, found),
        "what binds": binding(found),
        "searched": f"{format_some(found.simulations, 'simulation')}; "
        f"{format_some(len(found.refused), 'layout')} cannot do, "
        f"{found.beaten} {'is' if found.beaten == 1 else 'are'} too dear by their bound",
    }  # fmt: skip
    rows = [
        (
            plan.fleet.gpus,
            _layouts(plan),
            plan.fleet.serving.count
            if plan.fleet.prefill is None
            else f"{plan.fleet.prefill.count}:{plan.fleet.serving.count}",
            format_count(plan.fleet.serving.limits.batch_tokens),
            _p99(plan, "ttft"),
            _p99(plan, "itl"),
            f"{plan.outcome.good_share:.1%}",
            f"{plan.outcome.busy_share:.0%}",
            _dollars(plan),
        )
        for plan in found.plans
    ]
    columns = "GPUs, engine, engines, step, ttft p99, itl p99, good, busy, $/M"
    right = "GPUs, engines, step, ttft p99, itl p99, good, busy, $/M"
    return facts(said), table(columns, rows, right=right)


def why(question: ServingQuestion, found: ServingAnswer) -> str:
    """Say what the best plan is better than."""
    best, other = found.plans[0], found.other
    apart = best.fleet.prefill is not None
    kind = "without engines for prompts alone" if apart else "with engines for prompts alone"
    if other is None:
        said = f"nothing {kind} was found within {RIVALS:g} times its GPUs"
        if not question.apart:
            said = "engines for prompts alone were not looked at (--together)"
    elif other.fleet.gpus == best.fleet.gpus:
        said = f"the best {kind} takes as many GPUs, and has less to spare"
    else:
        said = f"the best {kind} takes {format_some(other.fleet.gpus, 'GPU')}"
    following = [plan for plan in found.plans[1:] if (plan.fleet.prefill is not None) == apart]
    if following:
        # Whole: a layout alone would not say of which kind it is.
        fleet = following[0].fleet
        said += f"; next of its kind: {engines_words(fleet)}, {format_some(fleet.gpus, 'GPU')}"
    return said


def binding(found: ServingAnswer) -> str:
    """Say what keeps the best plan from being cheaper."""
    best, fewer = found.plans[0].fleet, found.fewer
    if best.gpus == 1:
        return "nothing: one GPU is enough"
    if fewer is not None:
        layouts = [_layouts(plan) for plan in (found.plans[0], fewer)]
        alike = layouts[0] == layouts[1] and (best.prefill is None) == (fewer.fleet.prefill is None)
        less = "one engine less"
        if not alike:
            less = f"{format_some(fewer.fleet.gpus, 'GPU')} ({engines_words(fewer.fleet)})"
        return f"with {less}, {_missed(fewer)}"
    if found.unfit is not None:
        return f"with fewer GPUs ({found.unfit[0]}) {found.unfit[1]}"
    return "smaller layouts need as many GPUs or more"


def _missed(plan: ServingPlan) -> str:
    """Say what most requests miss that do not keep to the objective."""
    found = plan.outcome
    missed = found.missed or {}
    worst = max(missed, key=lambda name: missed[name], default="")
    if not missed.get(worst):
        return f"{1 - (found.good_share or 0.0):.1%} of requests are not answered"
    digits = 0 if missed[worst] > 0.1 else 1
    return f"{missed[worst]:.{digits}%} of requests miss {worst}"


def _nothing(question: ServingQuestion, found: ServingAnswer, times: str) -> tuple[View, ...]:
    """Say why there is no plan."""
    asked = ", ".join(f"{n} ≤ {format_seconds(v)}" for n, v in question.objective.items())
    there = question.allowed_gpus
    said = f"no fleet of {format_some(there, 'GPU')} or fewer was found that keeps to {asked}"
    rows = list(found.refused.items())[-_MOST_SHOWN:]
    near = ""
    if found.nearest is not None:
        fleet = found.nearest.fleet
        near = f"{format_some(fleet.gpus, 'GPU')}, {engines_words(fleet)}: {_missed(found.nearest)}"
    views: list[View] = [Text(said), facts({"nearest": near, "times": times})]
    if rows:
        views.append(table("layout, cannot do because", rows, wide="cannot do because"))
    if there < question.most_gpus:
        whose = "mw serve starts its engines on one machine"
        whose = whose if question.target == "meshwright" else question.cluster.name
        views.append(Note(f"{whose}: {format_some(there, 'GPU')}, not the {question.most_gpus}"))
    return (*views, Note(_hint(question, found)))


def _hint(question: ServingQuestion, found: ServingAnswer) -> str:
    """Say what would let a plan be found."""
    hints = ["--gpus allows more"] if question.allowed_gpus == question.most_gpus else []
    if found.impossible:
        return ", ".join([*hints, "--tp, --pp, --dp and --ep may have other values"])
    if narrower := _NARROWER.get(question.formats.weights):
        hints.append(f"--precision {narrower} takes less")
    return ", ".join([*hints, "--slo asks for less"])


def _layouts(plan: ServingPlan) -> str:
    own = layout_words(plan.fleet.serving)
    first = own if plan.fleet.prefill is None else layout_words(plan.fleet.prefill)
    return own if first == own else f"{first} → {own}"


def _p99(plan: ServingPlan, name: str) -> str:
    spread = plan.outcome.latency.get(name)
    return "" if spread is None else format_seconds(spread.p99_s)


def _dollars(plan: ServingPlan) -> str:
    price = plan.outcome.dollars_per_million_tokens
    return "" if price is None else f"{price:.3g}"


class _Watching:
    """A line on stderr that says how far a search is, where a person watches."""

    def __init__(self, *, quiet: bool) -> None:
        watched = sys.stderr.isatty() and not os.environ.get("MESHWRIGHT_NO_PROGRESS")
        self._shown = watched and not quiet

    def __enter__(self) -> "_Watching":
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """Say it in place of what was said before."""
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
