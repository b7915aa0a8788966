"""`mw simulate rl MODEL`: steps of reinforcement learning before a GPU is rented.

In the place of the model, settings of `mw train --recipe grpo` say the model and all of a step.
"""

import argparse
from typing import Any

import msgspec

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.calibrations import Used, add_calibration, used_for
from meshwright.cli.loop_described import Loop, beside_run, describe, names_loop
from meshwright.cli.parser import add_common
from meshwright.cli.rl_flags import (
    TRAINER,
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
from meshwright.policy.rollout import PLACEMENTS, TOO_OLD, lends_weights
from meshwright.predict.rl.engines import require_room
from meshwright.predict.rl.outcome import Outcome, predict_rl
from meshwright.predict.rl.setup import MEASURED, Setup, share_of
from meshwright.predict.rl.training import training_layout
from meshwright.predict.serving.fleet import Copies, default_limits
from meshwright.predict.serving.formats import Formats, WeightFormat
from meshwright.predict.serving.replica import Replica
from meshwright.predict.software import SOFTWARE
from meshwright.spec.bounds import require, whole
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes, format_count, format_seconds, parse_count

EXAMPLES = (
    "mw simulate rl llama3.1-8b --cluster h100-superpod --gpus 16 --placement colocated",
    "mw simulate rl llama3.1-8b --cluster h100-superpod --gpus 16 --placement one-step-off "
    "--rollout-gpus 8",
    "mw simulate rl qwen3-30b-a3b --cluster h100-superpod --gpus 32 --placement asynchronous "
    "--rollout-gpus 16 --tp 2 --max-staleness 4 --output lognormal:4000:0.8",
    "mw simulate rl sorting-digits --cluster h200-superpod",
    "mw simulate rl runs/sorting-digits-grpo --cluster cpu-host",
)
_OF_DEVICES = ("gpus", "rollout_gpus", "tp", *(f"train_{name}" for name in TRAINER))
"""Flags that a loop's own settings leave nothing to say."""
WAITS = {
    "groups": "too few groups have ended",
    "drain": "weights wait for groups that run",
    "weights": "weights come in",
    "staleness": "more would be too old",
    "memory": "the trainer has the GPUs",
    "end": "all is under way",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw simulate rl MODEL --cluster NAME --gpus N --placement WORD [flags]"
    add_served(parser, also="; or a loop: its task, file of settings, or run")
    # A loop has its own engine and formats.
    parser.set_defaults(engine=None, precision=None, kv=None)
    group = parser.add_argument_group("placement")
    group.add_argument("--gpus", metavar="N", help="of both sides together")
    group.add_argument(
        "--placement", choices=PLACEMENTS, metavar="WORD",
        help=f"{', '.join(PLACEMENTS)} (default: colocated)",
    )  # fmt: skip
    group.add_argument(
        "--rollout-gpus", metavar="N", help="that generate, where these are apart (default: half)"
    )
    group.add_argument(
        "--max-staleness", metavar="N",
        help="steps that a group may be behind when it is trained on; of asynchronous (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--too-old", choices=TOO_OLD, default="wait", metavar="WORD",
        help="groups that fall behind: a step waits for them (default), they are begun again, or "
        "dropped",
    )  # fmt: skip
    group.add_argument(
        "--running", metavar="N", help="groups under way at most (default: as many as may be)"
    )
    group.add_argument("--tp", metavar="N", help="GPUs of an engine (default: 1)")
    group.add_argument(
        "--steps", metavar="N", default=str(MEASURED), help=f"to measure (default: {MEASURED})"
    )
    add_rounds(parser)
    add_calibration(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with one step and where its time goes."""
    loop = describe(args.model) if names_loop(args.model) else None
    setup = setup_of(args) if loop is None else loop_setup(args, loop)
    used = used_for(args, setup.cluster.gpu)
    outcome = predict_rl(setup)
    remarks = [f"times are {used.rough}"] if used.rough else []
    remarks += [*rounds_remarks(setup.rounds), *adapter_remarks(setup)]
    remarks += too_full(setup, outcome)
    remarks += () if loop is None else loop.remarks
    data: dict[str, Any] = {
        "setup": setup_data(setup),
        "outcome": outcome_data(outcome),
        "calibration": used.data,
        "remarks": remarks,
    }
    views: list[View] = list(_screen(setup, outcome, used))
    if loop is not None and loop.rows:
        table_ = beside_run(loop, outcome)
        views.append(table_)
        data["beside"] = [dict(zip(("what", "predicted", "measured", "difference"), row,
                                   strict=True)) for row in table_.rows]  # fmt: skip
    # What the first one says stands on the screen.
    views += [Note(remark) for remark in remarks[bool(used.rough) :]]
    views.append(Note("mw validate rl holds such predictions against published runs"))
    return Answer("simulate.rl/1", data, tuple(views), (f"{outcome.step_s:.6g}",))


def loop_setup(args: argparse.Namespace, loop: Loop) -> Setup:
    """Return the setup of a loop: one device, or those of its trainer beside those of engines."""
    placement = args.placement or loop.placement
    overlaps = placement in ("one-step-off", "asynchronous")
    # Who draws while the trainer works, or for several ranks, is taken to have a device for it.
    engines = loop.engines or int(overlaps or loop.layout.gpus > 1)
    if given := [name for name in _OF_DEVICES if getattr(args, name) is not None]:
        what = "the file says which devices a loop has"
        fix = "leave it out, or describe the run by flags: MODEL --prompts 64 and so on"
        raise InputError([Problem(f"--{name.replace('_', '-')}", what, fix) for name in given])
    alone, gpus = engines == 0, loop.layout.gpus + engines * loop.engine_tp
    named = cluster_of(args)
    node = named.gpus_per_node
    try:
        cluster = share_of(named, gpus if gpus <= node else -(-gpus // node) * node)
    except InputError:
        sides = f"a trainer of {loop.layout.gpus} and {engines} engines of {loop.engine_tp}"
        what = f"{sides} are {gpus} devices, more than {named.name} can have"
        raise InputError([Problem("--cluster", what, "name a larger one")]) from None
    cpu = cluster.gpu.kind == "cpu"
    precision: WeightFormat = args.precision or loop.precision or ("fp32" if cpu else "bf16")
    formats = Formats(weights=precision, kv=args.kv or ("fp32" if precision == "fp32" else "bf16"))
    if loop.engine_weights == "fp8" and args.precision is None:
        formats = msgspec.structs.replace(formats, weights="fp8")
    args.engine = args.engine or "meshwright"
    replica = Replica(
        model=loop.model, cluster=cluster, formats=formats, engine=engine_of(args),
        layout=Layout(tp=loop.engine_tp), calibration=used_for(args, cluster.gpu).calibration,
    )  # fmt: skip
    limits = default_limits(
        replica, batch_requests=loop.limits.batch_requests,
        batch_tokens=loop.limits.batch_tokens, graph_tokens=loop.limits.graph_tokens,
    )  # fmt: skip
    staleness = loop.max_staleness if args.placement is None else None
    rounds = rounds_of(args, loop.rounds)
    return Setup(
        model=loop.model,
        cluster=cluster,
        placement=placement,
        engines=Copies(replica=replica, limits=limits, count=max(1, engines)),
        training=msgspec.structs.replace(
            loop.layout, precision="fp32" if precision == "fp32" else "bf16"
        ),
        rounds=rounds,
        max_staleness=parse_count(args.max_staleness, "--max-staleness")
        if args.max_staleness is not None
        else staleness,
        too_old=args.too_old,
        running=None if args.running is None else parse_count(args.running, "--running"),
        beside=alone and placement == "disaggregated",
        lent=lends_weights(adapted=rounds.adapter is not None, one_process=alone),
        software=SOFTWARE["meshwright"],
        measured=_steps(args),
    )


def _steps(args: argparse.Namespace) -> int:
    steps = parse_count(args.steps, "--steps")
    require(whole("--steps", steps, most=1000))
    return steps


def setup_of(args: argparse.Namespace) -> Setup:
    """Return the setup that the flags describe."""
    args.engine, args.precision = args.engine or "vllm", args.precision or "bf16"
    args.kv, args.placement = args.kv or "bf16", args.placement or "colocated"
    model = model_of(args)
    if args.gpus is None:
        raise InputError([Problem("--gpus", "how many GPUs are there?", "add --gpus 16, say")])
    gpus, tp = parse_count(args.gpus, "--gpus"), parse_count(args.tp or "1", "--tp")
    require(whole("--gpus", gpus, most=65_536), whole("--tp", tp, most=64))
    rollout, training = _split(args, gpus)
    if rollout % tp:
        what = f"{rollout} GPUs are no whole engines of {tp}"
        raise InputError([Problem("--tp", what, "use a degree that divides them")])
    cluster, rounds = share_of(cluster_of(args), gpus), rounds_of(args)
    replica = Replica(
        model=model, cluster=cluster, layout=Layout(tp=tp), engine=engine_of(args),
        formats=Formats(weights=args.precision, kv=args.kv),
        calibration=used_for(args, cluster.gpu).calibration,
    )  # fmt: skip
    engines = Copies(replica=replica, limits=default_limits(replica), count=rollout // tp)
    require_room(engines, rounds)  # before a layout is searched for, which takes longer
    layout = training_layout(
        model, share_of(cluster, training), rounds, trainer_fixed(args),
        calibration=replica.calibration,
    )  # fmt: skip
    staleness = args.max_staleness
    return Setup(
        model=model,
        cluster=cluster,
        placement=args.placement,
        engines=engines,
        training=layout,
        rounds=rounds,
        max_staleness=None if staleness is None else parse_count(staleness, "--max-staleness"),
        too_old=args.too_old,
        running=None if args.running is None else parse_count(args.running, "--running"),
        measured=_steps(args),
    )


def _split(args: argparse.Namespace, gpus: int) -> tuple[int, int]:
    """Return the GPUs that generate, and those that train."""
    if args.placement == "colocated":
        if args.rollout_gpus is not None:
            what = "both sides have all GPUs, by turns"
            fix = "leave it out, or place them apart"
            raise InputError([Problem("--rollout-gpus", what, fix)])
        return gpus, gpus
    half = str(max(1, gpus // 2))
    rollout = parse_count(args.rollout_gpus or half, "--rollout-gpus")
    if not 0 < rollout < gpus:
        what = f"{rollout} of {gpus} GPUs leave one side none"
        raise InputError([Problem("--rollout-gpus", what, f"use 1 to {gpus - 1}")])
    return rollout, gpus - rollout


def _screen(setup: Setup, outcome: Outcome, used: Used) -> tuple[View, ...]:
    terms, rounds = setup.arrangement, setup.rounds
    staleness = f"{outcome.staleness:.2g} on the average, {outcome.most_stale} at most"
    if outcome.dropped:
        staleness += f"; {outcome.dropped:.3g} of {rounds.prompts} groups let go as too old"
    peaks = ", ".join(f"{name} {format_bytes(size)}" for name, size in outcome.peak_bytes.items())
    skew = outcome.skew
    said = {
        "GPUs": gpus_words(setup),
        "step": f"{format_seconds(outcome.step_s)}, {outcome.tokens_per_s_per_gpu:,.0f} tokens/s "
        f"of a GPU ({format_count(round(outcome.tokens))} tokens a step)",
        "bubble": f"{outcome.bubble:.0%} of all GPU-seconds",
        "engines": f"{outcome.engines_busy:.0%} busy, {outcome.decoding:,.0f} sequences at once "
        "in each that decodes",
        "trainer": f"{format_seconds(outcome.training_s)} of training, "
        f"{outcome.training_mfu:.0%} MFU",
        "skewed lengths": "" if skew is None or outcome.even_step_s is None else
        f"{skew:+.0%}; {format_seconds(outcome.even_step_s)} were all answers equally long",
        "staleness": staleness if terms.max_staleness else "none: synchronous",
        "memory": f"{peaks} of {format_bytes(setup.cluster.gpu.memory_bytes)}",
        "costs": used.words,
        "times": used.rough,
    }  # fmt: skip
    rows = [
        ("trainer", "trains", *_time(outcome.training_s, outcome)),
        ("trainer", "sends weights", *_time(outcome.sync_s, outcome)),
    ]
    if outcome.phases_s:
        rows.append(("trainer", "moves its states", *_time(outcome.phases_s, outcome)))
    for who, waits in outcome.waits_s.items():
        for name, seconds in waits.items():
            rows.append((who, f"waits: {WAITS[name]} ({name})", *_time(seconds, outcome)))
    return facts(said), table("who, what, time, share", rows, right="time, share")


def _time(seconds: float, outcome: Outcome) -> tuple[str, str]:
    return format_seconds(seconds), f"{seconds / outcome.step_s:.0%}"
