"""`mw simulate serve MODEL`: how requests to a served model fare, before a GPU is rented."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.flags.requests import (
    UNLIMITED_RATE_PER_S,
    RequestStream,
    add_request_flags,
    read_streams,
)
from meshwright.cli.flags.served_model import (
    PARALLEL_DEGREES,
    add_engine_layout,
    add_scheduler_limits,
    add_served_model,
    read_deployment,
)
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView
from meshwright.cli.simulate.serve.screen import SimulatedStream, plot_latencies, render_streams
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.serving.serving_metrics import parse_slo
from meshwright.policy.serving.offline_order import longest_first
from meshwright.predict.serving.sim.served_requests import ServedRequests
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, ServingFleet, simulate_fleet
from meshwright.predict.serving.sim.serving_metrics import compute_serving_metrics
from meshwright.spec.field_checks import check_number, raise_problems
from meshwright.spec.model import Model
from meshwright.spec.units import format_quantity, parse_number
from meshwright.spec.workload import WorkloadRequest

EXAMPLES = (
    "mw simulate serve llama3.1-8b --cluster h200-superpod --rate 10 --prompt 500 --output 200",
    "mw simulate serve llama3.1-70b --cluster h100-superpod --tp 4 --replicas 2 --precision fp8 "
    "--trace requests.jsonl --routing prefix --slo ttft=500ms,itl=40ms",
    "mw simulate serve llama3.1-70b --cluster h100-superpod --tp 4 --disaggregate 1:1 "
    "--rate 1,2,4,8 --prompt 2000 --output 300 --slo ttft=1s,itl=40ms --plot load.svg",
)
DEFAULT_NUM_REQUESTS, DEFAULT_SLO_ATTAINMENT = 2000, 0.99
_PER_PLACE = 20
"""Requests for each one in flight, where nobody says how many."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw simulate serve MODEL --cluster NAME [requests] [flags]"
    add_served_model(parser)
    add_request_flags(parser, count=DEFAULT_NUM_REQUESTS)
    add_engine_layout(parser)
    add_scheduler_limits(parser)
    parser.add_argument(
        "--longest-first", action="store_true",
        help="of requests that are all there (--rate inf), those with the longest answers begin "
        "first, as in mw generate",
    )  # fmt: skip
    judged = parser.add_argument_group("what is made of it")
    add_slo(judged)
    judged.add_argument(
        "--timeline", metavar="PATH",
        help="keep steps and requests: a folder for mw timeline, or a .json.gz for Perfetto",
    )  # fmt: skip
    judged.add_argument("--plot", metavar="FILE", help="draw the load over time, as SVG")
    add_common(parser)


def add_slo(group: Any) -> None:
    """Add what requests are held to."""
    group.add_argument(
        "--slo",
        metavar="NAME=TIME,…",
        help="the longest ttft, itl, tpot or e2e: ttft=500ms,itl=40ms",
    )
    group.add_argument(
        "--slo-attainment", metavar="SHARE",
        help=f"share of requests that must meet it (default: {DEFAULT_SLO_ATTAINMENT})",
    )  # fmt: skip


def read_slo_attainment(args: argparse.Namespace) -> float:
    """Return the share of requests that must meet the objective."""
    if args.slo_attainment is None:
        return DEFAULT_SLO_ATTAINMENT
    if args.slo is None:
        what = "there is no objective that requests must meet"
        raise InputError(
            [Problem("--slo-attainment", what, "give --slo ttft=500ms,itl=40ms with it, say")]
        )
    found = parse_number(args.slo_attainment, "--slo-attainment")
    raise_problems(check_number("--slo-attainment", found, 0.0, 1.0))
    return found


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what each stream of requests comes to."""
    fleet, attain = read_deployment(args), read_slo_attainment(args)
    objective = None if args.slo is None else parse_slo(args.slo, "--slo")
    streams = read_sized_streams(args)
    if args.timeline and len(streams) > 1:
        fix = "give one rate or concurrency"
        raise InputError([Problem("--timeline", f"there are {len(streams)} runs", fix)])
    runs, beyond = [], []
    for stream in streams:
        requests, left_out = drop_overlong_requests(
            generate_requests(stream), fleet.serving_pool.replica.model, args
        )
        if args.longest_first:
            requests = _longest_first(requests, stream)
        served = simulate_fleet(fleet, requests, in_flight=stream.concurrency)
        _require_room(served, fleet)
        runs.append(
            SimulatedStream(stream.name, served, compute_serving_metrics(served, fleet, objective))
        )
        beyond.append(left_out)
    notes = make_context_notes(max(beyond), fleet.serving_pool.replica.model)
    if args.timeline:
        _write_timeline(args.timeline, runs[0].served, fleet)
        notes.append(NoteView(f"wrote {args.timeline}"))
    if args.plot:
        plot_latencies(args.plot, runs)
        notes.append(NoteView(f"wrote {args.plot}"))
    shares = [run.outcome.slo_attainment for run in runs if run.outcome.slo_attainment is not None]
    data = {
        "fleet": deployment_to_data(fleet),
        "slo": objective,
        "slo_attainment": attain if objective else None,
        "runs": [
            {"name": one.name, "beyond_context": count, **msgspec.to_builtins(one.outcome)}
            for one, count in zip(runs, beyond, strict=True)
        ],
    }
    quiet = tuple(f"{one.outcome.output_tokens_per_s:.6g}" for one in runs)
    code = 1 if shares and min(shares) < attain else 0
    views = (*render_streams(fleet, runs, objective, attain), *notes)
    return CommandResult("simulate.serve/2", data, views, quiet, code)


def _longest_first(requests: list[WorkloadRequest], stream: RequestStream) -> list[WorkloadRequest]:
    if stream.rate_per_s != UNLIMITED_RATE_PER_S:
        what = "requests that come over time begin as they come"
        raise InputError([Problem("--longest-first", what, "give --rate inf, or leave it out")])
    order = longest_first([one.output_tokens for one in requests])
    times = [one.arrival_s for one in requests]
    return [
        msgspec.structs.replace(requests[number], arrival_s=at)
        for number, at in zip(order, times, strict=True)
    ]


def _require_room(served: ServedRequests, fleet: ServingFleet) -> None:
    """Raise where every request is longer than the KV cache."""
    if served.completed.any():
        return
    limits = fleet.serving_pool.scheduler_config
    block = limits.block_size
    there = min(served.kv_blocks)
    needed = -(-(served.prompt_tokens + served.output_tokens - 1) // block)
    what = (
        f"{there:,} blocks of {block} tokens hold none of the {len(needed):,} requests: "
        f"the shortest takes {needed.min():,}, the longest {needed.max():,}"
    )
    if limits.num_gpu_blocks is not None:
        fix = (
            f"use --num-gpu-blocks-override {needed.max()}, or leave it out for what the memory "
            f"holds"
        )
        raise InputError([Problem("--num-gpu-blocks-override", what, fix)])
    raise InputError([Problem("memory", what, "use a larger --tp or --pp, or fewer bits")])


def read_sized_streams(args: argparse.Namespace) -> list[RequestStream]:
    """Return the streams that the flags describe, long enough to settle where nobody says."""
    if args.requests is not None or args.trace is not None:
        return read_streams(args)
    if args.duration is not None:
        found = read_streams(args)
        if any(stream.concurrency is not None for stream in found):
            what = "who is kept in flight has no arrival times to stop at"
            raise InputError([Problem("--duration", what, "give --requests")])
        return found
    args.requests = str(DEFAULT_NUM_REQUESTS)
    most = max(stream.concurrency or 0 for stream in read_streams(args))
    args.requests = str(max(DEFAULT_NUM_REQUESTS, _PER_PLACE * most))
    return read_streams(args)


def generate_requests(stream: RequestStream) -> list[WorkloadRequest]:
    """Return the requests of a stream."""
    found = list(stream.generate())
    if not found:
        what = "no request arrives in that time"
        raise InputError([Problem("--duration", what, "use a longer one, or a higher rate")])
    return found


def drop_overlong_requests(
    requests: list[WorkloadRequest], model: Model, args: argparse.Namespace
) -> tuple[list[WorkloadRequest], int]:
    """Return the requests that a model's context holds, and how many others there are.

    Engines refuse the others when they come, before they cost anything.
    """
    most = model.max_positions
    kept = [one for one in requests if one.prompt_tokens + one.output_tokens <= most]
    if not kept:
        shortest = min(one.prompt_tokens + one.output_tokens for one in requests)
        what = (
            f"with their answers all requests are longer than the context of {model.name}, "
            f"{most:,} tokens: the shortest has {shortest:,}"
        )
        where = args.trace or args.workload or "--prompt"
        raise InputError([Problem(where, what, "ask for less, or of a model that takes more")])
    return kept, len(requests) - len(kept)


def make_context_notes(beyond: int, model: Model) -> list[NoteView]:
    """Say how many requests were left out because a model's context does not hold them."""
    if not beyond:
        return []
    many = format_quantity(beyond, "request is longer", "requests are longer")
    what = f"{many} than the context of {model.name}, {model.max_positions:,} tokens"
    return [NoteView(f"{what}: an engine refuses them, and they are left out")]


def deployment_to_data(fleet: ServingFleet) -> dict[str, Any]:
    """Return a fleet as plain data."""
    replica = fleet.serving_pool.replica
    return {
        "model": replica.model.name,
        "cluster": replica.cluster.name,
        "engine": replica.engine.name,
        "weights": replica.quantization.weights,
        "kv": replica.quantization.kv,
        "layout": _layout_data(fleet.serving_pool),
        "replicas": fleet.serving_pool.count,
        "prefill_layout": None if fleet.prefill_pool is None else _layout_data(fleet.prefill_pool),
        "prefill_replicas": fleet.prefill_pool.count if fleet.prefill_pool else 0,
        "gpus": fleet.gpus,
        "routing": fleet.routing,
        "scheduler_config": msgspec.to_builtins(fleet.serving_pool.scheduler_config),
        "prefill_scheduler_config": None
        if fleet.prefill_pool is None
        else msgspec.to_builtins(fleet.prefill_pool.scheduler_config),
    }


def _layout_data(copies: ReplicaPool) -> dict[str, int]:
    """Return the degrees, with how many GPUs every expert is cut over."""
    layout = copies.replica.layout
    degrees = {name: getattr(layout, name) for name in PARALLEL_DEGREES}
    return {**degrees, "expert_tp": layout.effective_expert_tp}


def _write_timeline(path: str, served: ServedRequests, fleet: ServingFleet) -> None:
    from meshwright.predict.serving.sim.serving_timeline import build_serving_timeline
    from meshwright.timeline import write_perfetto, write_timeline

    timeline = build_serving_timeline(served, {"model": fleet.serving_pool.replica.model.name})
    if Path(path).suffix:
        write_perfetto(timeline, path)
    else:
        write_timeline(timeline, path)
