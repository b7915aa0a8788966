"""`mw plan serve MODEL`: the cheapest way to serve requests in time, and what binds it."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.flags.requests import UNLIMITED_RATE_PER_S, add_request_flags
from meshwright.cli.flags.served_model import (
    ENGINE_NAMES,
    PARALLEL_DEGREES,
    add_served_model,
    find_engine,
    read_served_cluster,
    read_served_model,
)
from meshwright.cli.parser import add_common
from meshwright.cli.render.progress import ProgressLine
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_fields, make_table
from meshwright.cli.simulate.serve.command import (
    DEFAULT_NUM_REQUESTS,
    add_slo,
    deployment_to_data,
    drop_overlong_requests,
    generate_requests,
    make_context_notes,
    read_sized_streams,
    read_slo_attainment,
)
from meshwright.cli.simulate.serve.screen import (
    format_engine_layout,
    format_engines,
    format_limits,
    format_slo_attainment,
)
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.serving.serving_metrics import parse_slo
from meshwright.policy.serving.router import ROUTING_POLICIES
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.plan.engine_candidates import EngineSpace
from meshwright.predict.serving.plan.engine_command import (
    ENGINE_TARGETS,
    EngineTarget,
    build_command_lines,
)
from meshwright.predict.serving.plan.serving_question import (
    ServingAnswer,
    ServingPlan,
    ServingQuestion,
)
from meshwright.predict.serving.plan.serving_search import MAX_COST_RATIO, plan_serving
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.units import format_count, format_quantity, format_seconds, parse_count

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

_WHOSE: dict[EngineTarget, tuple[str, ...]] = {
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
    add_served_model(parser, engine="that of --for, or vllm")
    judged = parser.add_argument_group("what is asked of it")
    add_slo(judged)
    judged.add_argument("--gpus", metavar="N", default="64", help="as many at most (default: 64)")
    add_request_flags(parser, count=DEFAULT_NUM_REQUESTS, one_rate=True)
    group = parser.add_argument_group("the search")
    for name in PARALLEL_DEGREES:
        group.add_argument(f"--{name}", metavar="N,…", help=f"only these values of {name}")
    group.add_argument(
        "--together", action="store_true", help="no engines that only compute prompts"
    )
    group.add_argument(
        "--routing", choices=ROUTING_POLICIES, default="least-loaded", metavar="WORD",
        help=f"{', '.join(ROUTING_POLICIES)} (default: least-loaded)",
    )  # fmt: skip
    group.add_argument("--top", metavar="K", default="5", help="plans to show (default: 5)")
    group.add_argument(
        "--for", dest="target", choices=ENGINE_TARGETS, metavar="NAME",
        help=f"plan what it can run, and print the command lines: {', '.join(ENGINE_TARGETS)}",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the cheapest plans."""
    said = args.engine is not None or args.target is not None
    args.engine = _engine_name(args)
    (question, beyond), top = _question(args), parse_count(args.top, "--top")
    raise_problems(check_integer("--top", top))
    with ProgressLine(quiet=args.quiet or args.json) as line:
        found = plan_serving(question, most=top, report=line.show)
    left_out = make_context_notes(beyond, question.model)
    times = f"{question.engine.name}'s" + ("" if said else ": neither --for nor --engine is given")
    data: dict[str, Any] = {
        "beyond_context": beyond,
        "slo": question.slo,
        "slo_attainment": question.slo_attainment,
        "engine": question.engine.name,
        "plans": [_data(plan) for plan in found.plans],
        "infeasible": found.infeasible,
        "pruned": found.pruned,
        "simulations": found.simulations,
        "smaller_fleet": None if found.smaller_fleet is None else _data(found.smaller_fleet),
        "best_effort": None if found.best_effort is None else _data(found.best_effort),
    }
    if not found.plans:
        return CommandResult(
            "plan.serve/2", data, (*_nothing(question, found, times), *left_out), (), 1
        )
    target: EngineTarget = args.target or _own_target(args.engine)
    is_folder = Path(args.model).is_dir()
    exported = build_command_lines(
        found.plans[0].fleet, target, args.model if is_folder else _FOLDER
    )
    notes = exported.notes if is_folder else (_stands_for(args.model, target), *exported.notes)
    if not exported.lines:
        notes = exported.notes
    data["commands"] = {
        "target": target,
        "lines": exported.lines,
        "replica_counts": exported.replica_counts,
        "notes": notes,
    }
    views = [*_screen(question, found, times), *left_out]
    if args.target:
        views.append(TextView("\n".join(exported.lines)))
        views += [NoteView(note) for note in notes]
    elif exported.lines:
        views.append(NoteView(f"--for {target} prints its command lines"))
    else:
        views.append(NoteView(f"{notes[0]}; --for {target} looks for a plan that it can run"))
    best = found.plans[0].fleet
    quiet = f"{format_quantity(best.gpus, 'GPU')}: {format_engines(best)}"
    return CommandResult("plan.serve/2", data, tuple(views), (quiet,))


def _question(args: argparse.Namespace) -> tuple[ServingQuestion, int]:
    """Return what is asked, and how many requests no engine would take."""
    if args.slo is None:
        fix = "say what requests are held to: --slo ttft=500ms,itl=40ms"
        raise InputError([Problem("--slo", "in time, which is what?", fix)])
    gpus = parse_count(args.gpus, "--gpus")
    raise_problems(check_integer("--gpus", gpus, most=4096))
    streams = read_sized_streams(args)
    if len(streams) > 1 or streams[0].concurrency is not None:
        what = "a plan is for one stream of requests that arrive by themselves"
        raise InputError([Problem("--rate", what, "give one rate, or a trace with times")])
    if streams[0].rate_per_s == UNLIMITED_RATE_PER_S:
        what = "requests that are all there at once have no rate that engines could keep up with"
        fix = "give a rate; mw simulate serve --rate inf says how long they take"
        raise InputError([Problem("--rate", what, fix)])
    space = EngineSpace(**{name: _values(args, name) for name in PARALLEL_DEGREES})
    model = read_served_model(args)
    requests, beyond = drop_overlong_requests(generate_requests(streams[0]), model, args)
    question = ServingQuestion(
        model=model,
        cluster=read_served_cluster(args, gpus),
        requests=tuple(requests),
        slo=dict(parse_slo(args.slo, "--slo")),
        slo_attainment=read_slo_attainment(args),
        max_gpus=gpus,
        quantization=Quantization(weights=args.precision, kv=args.kv_cache_dtype),
        engine=find_engine(args),
        routing=args.routing,
        space=space,
        allow_disaggregated=not args.together,
        target=args.target,
    )
    return question, beyond


def _values(args: argparse.Namespace, name: str) -> tuple[int, ...] | None:
    text = getattr(args, name)
    if text is None:
        return None
    found = tuple(parse_count(word, f"--{name}") for word in text.split(",") if word.strip())
    raise_problems(*(check_integer(f"--{name}", value, most=4096) for value in found))
    return found or None


def _engine_name(args: argparse.Namespace) -> str:
    """Return whose times count: the engine's that is named, or that the command lines start."""
    target: EngineTarget | None = args.target
    if args.engine is None:
        return "vllm" if target is None else _WHOSE[target][0]
    engine = find_engine(args)
    if target is not None and engine not in (ENGINE_NAMES[name] for name in _WHOSE[target]):
        what = f"command lines are for {target}, and times would be those of {engine.name}"
        fix = f"leave it out, or use --engine {_WHOSE[target][0]}"
        raise InputError([Problem("--engine", what, fix)])
    named: str = args.engine
    return named


def _own_target(engine: str) -> EngineTarget:
    return next(target for target, names in _WHOSE.items() if engine.lower() in names)


def _stands_for(model: str, target: EngineTarget) -> str:
    also = "" if target == "meshwright" else ", or for their name on Hugging Face"
    return f"{_FOLDER} stands for the folder with the weights of {model}{also}"


def _data(plan: ServingPlan) -> dict[str, Any]:
    return {"fleet": deployment_to_data(plan.fleet), "outcome": msgspec.to_builtins(plan.metrics)}


def _screen(question: ServingQuestion, found: ServingAnswer, times: str) -> tuple[View, ...]:
    best = found.plans[0]
    replica, limits = best.fleet.serving_pool.replica, best.fleet.serving_pool.scheduler_config
    price = best.fleet.dollars_per_hour
    said = {
        "plan": f"{best.fleet.gpus} × {replica.cluster.gpu.name}: {format_engines(best.fleet)}",
        "limits": format_limits(limits),
        "times": times,
        "objective": format_slo_attainment(question.slo, best.metrics, question.slo_attainment),
        "cost": "" if price is None else f"${price:,.2f} an hour, "
        f"${best.metrics.dollars_per_million_tokens:.3g} for a million tokens of answers",
        "why": describe_choice(question, found),
        "what binds": describe_binding_constraints(found),
        "searched": f"{format_quantity(found.simulations, 'simulation')}; "
        f"{format_quantity(len(found.infeasible), 'layout')} infeasible, "
        f"{found.pruned} pruned by their bound",
    }  # fmt: skip
    rows = [
        (
            plan.fleet.gpus,
            _layouts(plan),
            plan.fleet.serving_pool.count
            if plan.fleet.prefill_pool is None
            else f"{plan.fleet.prefill_pool.count}:{plan.fleet.serving_pool.count}",
            format_count(plan.fleet.serving_pool.scheduler_config.max_num_batched_tokens),
            _p99(plan, "ttft"),
            _p99(plan, "itl"),
            f"{plan.metrics.slo_attainment:.1%}",
            f"{plan.metrics.engine_utilization:.0%}",
            _dollars(plan),
        )
        for plan in found.plans
    ]
    columns = "GPUs, engine, engines, step, ttft p99, itl p99, good, busy, $/M"
    right = "GPUs, engines, step, ttft p99, itl p99, good, busy, $/M"
    return make_fields(said), make_table(columns, rows, right=right)


def describe_choice(question: ServingQuestion, found: ServingAnswer) -> str:
    """Say what the best plan is better than."""
    best, other = found.plans[0], found.alternative
    apart = best.fleet.prefill_pool is not None
    kind = "without engines for prompts alone" if apart else "with engines for prompts alone"
    if other is None:
        said = f"nothing {kind} was found within {MAX_COST_RATIO:g} times its GPUs"
        if not question.allow_disaggregated:
            said = "engines for prompts alone were not looked at (--together)"
    elif other.fleet.gpus == best.fleet.gpus:
        said = f"the best {kind} takes as many GPUs, and has less to spare"
    else:
        said = f"the best {kind} takes {format_quantity(other.fleet.gpus, 'GPU')}"
    following = [plan for plan in found.plans[1:] if (plan.fleet.prefill_pool is not None) == apart]
    if following:
        # Whole: a layout alone would not say of which kind it is.
        fleet = following[0].fleet
        said += f"; next of its kind: {format_engines(fleet)}, {format_quantity(fleet.gpus, 'GPU')}"
    return said


def describe_binding_constraints(found: ServingAnswer) -> str:
    """Say what keeps the best plan from being cheaper."""
    best, fewer = found.plans[0].fleet, found.smaller_fleet
    if best.gpus == 1:
        return "nothing: one GPU is enough"
    if fewer is not None:
        layouts = [_layouts(plan) for plan in (found.plans[0], fewer)]
        alike = layouts[0] == layouts[1] and (best.prefill_pool is None) == (
            fewer.fleet.prefill_pool is None
        )
        less = "one engine less"
        if not alike:
            less = f"{format_quantity(fewer.fleet.gpus, 'GPU')} ({format_engines(fewer.fleet)})"
        return f"with {less}, {_missed(fewer)}"
    if found.largest_infeasible is not None:
        return f"with fewer GPUs ({found.largest_infeasible[0]}) {found.largest_infeasible[1]}"
    return "smaller layouts need as many GPUs or more"


def _missed(plan: ServingPlan) -> str:
    """Say what most requests miss that do not keep to the objective."""
    found = plan.metrics
    missed = found.slo_violations or {}
    worst = max(missed, key=lambda name: missed[name], default="")
    if not missed.get(worst):
        return f"{1 - (found.slo_attainment or 0.0):.1%} of requests are not answered"
    digits = 0 if missed[worst] > 0.1 else 1
    return f"{missed[worst]:.{digits}%} of requests miss {worst}"


def _nothing(question: ServingQuestion, found: ServingAnswer, times: str) -> tuple[View, ...]:
    """Say why there is no plan."""
    asked = ", ".join(f"{n} ≤ {format_seconds(v)}" for n, v in question.slo.items())
    there = question.allowed_gpus
    said = f"no fleet of {format_quantity(there, 'GPU')} or fewer was found that meets {asked}"
    rows = list(found.infeasible.items())[-_MOST_SHOWN:]
    near = ""
    if found.best_effort is not None:
        fleet = found.best_effort.fleet
        near = (
            f"{format_quantity(fleet.gpus, 'GPU')}, {format_engines(fleet)}: "
            f"{_missed(found.best_effort)}"
        )
    views: list[View] = [TextView(said), make_fields({"nearest": near, "times": times})]
    if rows:
        views.append(make_table("infeasible layout, reason", rows, wide="reason"))
    if there < question.max_gpus:
        whose = "mw serve starts its engines on one machine"
        whose = whose if question.target == "meshwright" else question.cluster.name
        views.append(
            NoteView(f"{whose}: {format_quantity(there, 'GPU')}, not the {question.max_gpus}")
        )
    return (*views, NoteView(_hint(question, found)))


def _hint(question: ServingQuestion, found: ServingAnswer) -> str:
    """Say what would let a plan be found."""
    hints = ["--gpus allows more"] if question.allowed_gpus == question.max_gpus else []
    if found.impossible:
        return ", ".join([*hints, "--tp, --pp, --dp and --ep may have other values"])
    if narrower := _NARROWER.get(question.quantization.weights):
        hints.append(f"--precision {narrower} takes less")
    return ", ".join([*hints, "--slo asks for less"])


def _layouts(plan: ServingPlan) -> str:
    own = format_engine_layout(plan.fleet.serving_pool)
    first = (
        own if plan.fleet.prefill_pool is None else format_engine_layout(plan.fleet.prefill_pool)
    )
    return own if first == own else f"{first} → {own}"


def _p99(plan: ServingPlan, name: str) -> str:
    spread = plan.metrics.latency.get(name)
    return "" if spread is None else format_seconds(spread.p99_s)


def _dollars(plan: ServingPlan) -> str:
    price = plan.metrics.dollars_per_million_tokens
    return "" if price is None else f"{price:.3g}"
