"""`mw simulate rl MODEL`: steps of reinforcement learning before a GPU is rented.

In the place of the model, settings of `mw train --recipe grpo` say the model and all of a step.
"""

import argparse
from typing import Any

import msgspec

from meshwright.cli.flags.calibration import CalibrationChoice, add_calibration, choose_calibration
from meshwright.cli.flags.problems import declare_flag_names
from meshwright.cli.flags.rl import (
    TRAINER_DEGREES,
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
from meshwright.cli.flags.rl_run import RLRunDescription, compare_with_run, is_rl_run, read_rl_run
from meshwright.cli.flags.served_model import (
    add_served_model,
    find_engine,
    read_served_cluster,
    read_served_model,
)
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import PLACEMENTS, STALE_POLICIES, shares_weights
from meshwright.predict.rl.rl_metrics import RLMetrics, predict_rl
from meshwright.predict.rl.rl_setup import DEFAULT_MEASURED_STEPS, RLSetup, take_gpu_share
from meshwright.predict.rl.rollout_engines import require_kv_room
from meshwright.predict.rl.trainer_layout import find_trainer_layout
from meshwright.predict.serving.cost.quantization import Quantization, WeightFormat
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, default_scheduler_config
from meshwright.predict.training_run.training_framework import FRAMEWORKS
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.layout import Layout
from meshwright.spec.units import format_bytes, format_count, format_seconds, parse_count

EXAMPLES = (
    "mw simulate rl llama3.1-8b --cluster h100-superpod --gpus 16 --placement colocated",
    "mw simulate rl llama3.1-8b --cluster h100-superpod --gpus 16 --placement one_step_off "
    "--rollout-gpus 8",
    "mw simulate rl qwen3-30b-a3b --cluster h100-superpod --gpus 32 --placement async "
    "--rollout-gpus 16 --tp 2 --max-staleness 4 --output lognormal:4000:0.8",
    "mw simulate rl sorting-digits --cluster h200-superpod",
    "mw simulate rl runs/sorting-digits-grpo --cluster cpu-host",
)

_OF_DEVICES = ("gpus", "rollout_gpus", "tp", *(f"train_{name}" for name in TRAINER_DEGREES))
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
    add_served_model(parser, also="; or a loop: its task, file of settings, or run")
    # A loop has its own engine and formats.
    parser.set_defaults(engine=None, precision=None, kv_cache_dtype=None)
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
        help="steps that a group may be behind when it is trained on; of async (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--on-stale", choices=STALE_POLICIES, default="wait", metavar="WORD",
        help="groups that fall behind: a step waits for them (default), they are begun again, or "
        "dropped",
    )  # fmt: skip
    group.add_argument(
        "--max-running-groups",
        metavar="N",
        help="groups under way at most (default: as many as may be)",
    )
    group.add_argument("--tp", metavar="N", help="GPUs of an engine (default: 1)")
    group.add_argument(
        "--steps",
        metavar="N",
        default=str(DEFAULT_MEASURED_STEPS),
        help=f"to measure (default: {DEFAULT_MEASURED_STEPS})",
    )
    declare_flag_names(parser, stale_policy="--on-stale")
    add_rollout_flags(parser)
    add_calibration(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with one step and where its time goes."""
    loop = read_rl_run(args.model) if is_rl_run(args.model) else None
    setup = read_setup(args) if loop is None else setup_from_run(args, loop)
    used = choose_calibration(args, setup.cluster.gpu)
    outcome = predict_rl(setup)
    remarks = [f"times are {used.accuracy_note}"] if used.accuracy_note else []
    remarks += [*list_rollout_notes(setup.rollout_batch), *list_adapter_notes(setup)]
    remarks += find_memory_overflows(setup, outcome)
    remarks += () if loop is None else loop.notes
    data: dict[str, Any] = {
        "setup": setup_to_data(setup),
        "outcome": outcome_to_data(outcome),
        "calibration": used.data,
        "remarks": remarks,
    }
    views: list[View] = list(_screen(setup, outcome, used))
    if loop is not None and loop.measured_steps:
        table_ = compare_with_run(loop, outcome)
        views.append(table_)
        data["comparison"] = [dict(zip(("what", "predicted", "measured", "difference"), row,
                                   strict=True)) for row in table_.rows]  # fmt: skip
    # What the first one says stands on the screen.
    views += [NoteView(remark) for remark in remarks[bool(used.accuracy_note) :]]
    views.append(NoteView("mw validate rl compares such predictions with published runs"))
    return CommandResult("simulate.rl/2", data, tuple(views), (f"{outcome.step_s:.6g}",))


def setup_from_run(args: argparse.Namespace, loop: RLRunDescription) -> RLSetup:
    """Return the setup of a loop: one device, or those of its trainer beside those of engines."""
    placement = args.placement or loop.placement
    overlaps = placement in ("one_step_off", "async")
    # Who draws while the trainer works, or for several ranks, is taken to have a device for it.
    engines = loop.engines or int(overlaps or loop.layout.gpus > 1)
    if given := [name for name in _OF_DEVICES if getattr(args, name) is not None]:
        what = "the file says which devices a loop has"
        fix = "leave it out, or describe the run by flags: MODEL --prompts-per-step 64 and so on"
        raise InputError([Problem(f"--{name.replace('_', '-')}", what, fix) for name in given])
    alone, gpus = engines == 0, loop.layout.gpus + engines * loop.engine_tp
    named = read_served_cluster(args)
    node = named.gpus_per_node
    try:
        cluster = take_gpu_share(named, gpus if gpus <= node else -(-gpus // node) * node)
    except InputError:
        sides = f"a trainer of {loop.layout.gpus} and {engines} engines of {loop.engine_tp}"
        what = f"{sides} are {gpus} devices, more than {named.name} can have"
        raise InputError([Problem("--cluster", what, "name a larger one")]) from None
    cpu = cluster.gpu.kind == "cpu"
    precision: WeightFormat = args.precision or loop.precision or ("fp32" if cpu else "bf16")
    formats = Quantization(
        weights=precision, kv=args.kv_cache_dtype or ("fp32" if precision == "fp32" else "bf16")
    )
    if loop.engine_weights == "fp8" and args.precision is None:
        formats = msgspec.structs.replace(formats, weights="fp8")
    args.engine = args.engine or "meshwright"
    replica = Replica(
        model=loop.model,
        cluster=cluster,
        quantization=formats,
        engine=find_engine(args),
        layout=Layout(tp=loop.engine_tp),
        calibration=choose_calibration(args, cluster.gpu).calibration,
    )
    limits = default_scheduler_config(
        replica,
        max_num_seqs=loop.limits.max_num_seqs,
        max_num_batched_tokens=loop.limits.max_num_batched_tokens,
        max_cudagraph_capture_size=loop.limits.max_cudagraph_capture_size,
    )
    staleness = loop.max_staleness if args.placement is None else None
    rounds = read_rollouts(args, loop.rollout_parameters)
    return RLSetup(
        model=loop.model,
        cluster=cluster,
        placement=placement,
        rollout_pool=ReplicaPool(replica=replica, scheduler_config=limits, count=max(1, engines)),
        trainer_layout=msgspec.structs.replace(
            loop.layout, precision="fp32" if precision == "fp32" else "bf16"
        ),
        rollout_batch=rounds,
        max_staleness=parse_count(args.max_staleness, "--max-staleness")
        if args.max_staleness is not None
        else staleness,
        stale_policy=args.on_stale,
        max_running_groups=_max_running_groups(args),
        shares_gpus_concurrently=alone and placement == "disaggregated",
        shares_trainer_weights=shares_weights(
            adapted=rounds.adapter is not None, one_process=alone
        ),
        trainer_framework=FRAMEWORKS["meshwright"],
        measured_steps=_steps(args),
    )


def _max_running_groups(args: argparse.Namespace) -> int | None:
    text = args.max_running_groups
    return None if text is None else parse_count(text, "--max-running-groups")


def _steps(args: argparse.Namespace) -> int:
    steps = parse_count(args.steps, "--steps")
    raise_problems(check_integer("--steps", steps, most=1000))
    return steps


def read_setup(args: argparse.Namespace) -> RLSetup:
    """Return the setup that the flags describe."""
    args.engine, args.precision = args.engine or "vllm", args.precision or "bf16"
    args.kv_cache_dtype, args.placement = (
        args.kv_cache_dtype or "bf16",
        args.placement or "colocated",
    )
    model = read_served_model(args)
    if args.gpus is None:
        raise InputError([Problem("--gpus", "how many GPUs are there?", "add --gpus 16, say")])
    gpus, tp = parse_count(args.gpus, "--gpus"), parse_count(args.tp or "1", "--tp")
    raise_problems(check_integer("--gpus", gpus, most=65_536), check_integer("--tp", tp, most=64))
    rollout, training = _split(args, gpus)
    if rollout % tp:
        what = f"{rollout} GPUs are no whole engines of {tp}"
        raise InputError([Problem("--tp", what, "use a degree that divides them")])
    cluster, rounds = take_gpu_share(read_served_cluster(args), gpus), read_rollouts(args)
    replica = Replica(
        model=model, cluster=cluster, layout=Layout(tp=tp), engine=find_engine(args),
        quantization=Quantization(weights=args.precision, kv=args.kv_cache_dtype),
        calibration=choose_calibration(args, cluster.gpu).calibration,
    )  # fmt: skip
    engines = ReplicaPool(
        replica=replica, scheduler_config=default_scheduler_config(replica), count=rollout // tp
    )
    require_kv_room(engines, rounds)  # before a layout is searched for, which takes longer
    layout = find_trainer_layout(
        model, take_gpu_share(cluster, training), rounds, read_trainer_constraints(args),
        calibration=replica.calibration,
    )  # fmt: skip
    staleness = args.max_staleness
    return RLSetup(
        model=model,
        cluster=cluster,
        placement=args.placement,
        rollout_pool=engines,
        trainer_layout=layout,
        rollout_batch=rounds,
        max_staleness=None if staleness is None else parse_count(staleness, "--max-staleness"),
        stale_policy=args.on_stale,
        max_running_groups=_max_running_groups(args),
        measured_steps=_steps(args),
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


def _screen(setup: RLSetup, outcome: RLMetrics, used: CalibrationChoice) -> tuple[View, ...]:
    terms, rounds = setup.rollout_policy, setup.rollout_batch
    staleness = f"{outcome.mean_staleness:.2g} on the average, {outcome.max_staleness} at most"
    if outcome.dropped_groups:
        staleness += (
            f"; {outcome.dropped_groups:.3g} of {rounds.prompts_per_step} groups let go as too old"
        )
    peaks = ", ".join(f"{name} {format_bytes(size)}" for name, size in outcome.peak_bytes.items())
    skew = outcome.length_skew_slowdown
    said = {
        "GPUs": format_gpu_roles(setup),
        "step": f"{format_seconds(outcome.step_s)}, {outcome.tokens_per_s_per_gpu:,.0f} tokens/s "
        f"of a GPU ({format_count(round(outcome.tokens))} tokens a step)",
        "bubble": f"{outcome.bubble:.0%} of all GPU-seconds",
        "engines": f"{outcome.engine_utilization:.0%} busy, {outcome.mean_decode_batch:,.0f} "
                   f"sequences at once "
        "in each that decodes",
        "trainer": f"{format_seconds(outcome.training_s)} of training, "
        f"{outcome.training_mfu:.0%} MFU",
        "skewed lengths": "" if skew is None or outcome.equal_length_step_s is None else
        f"{skew:+.0%}; {format_seconds(outcome.equal_length_step_s)} were all answers equally long",
        "staleness": staleness if terms.max_staleness else "none: synchronous",
        "memory": f"{peaks} of {format_bytes(setup.cluster.gpu.memory_bytes)}",
        "costs": used.description,
        "times": used.accuracy_note,
    }  # fmt: skip
    rows = [
        ("trainer", "trains", *_time(outcome.training_s, outcome)),
        ("trainer", "sends weights", *_time(outcome.sync_s, outcome)),
    ]
    if outcome.memory_phases_s:
        rows.append(("trainer", "moves its states", *_time(outcome.memory_phases_s, outcome)))
    for who, waits in outcome.waits_s.items():
        for name, seconds in waits.items():
            rows.append((who, f"waits: {WAITS[name]} ({name})", *_time(seconds, outcome)))
    return make_fields(said), make_table("who, what, time, share", rows, right="time, share")


def _time(seconds: float, outcome: RLMetrics) -> tuple[str, str]:
    return format_seconds(seconds), f"{seconds / outcome.step_s:.0%}"
