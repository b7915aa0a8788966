"""`mw simulate serve MODEL`: how requests to a served model fare, before a GPU is rented."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.answer import Answer, Note
from meshwright.cli.parser import add_common
from meshwright.cli.request_flags import ALL_AT_ONCE, Stream, add_request_flags, streams_of
from meshwright.cli.serve_flags import DEGREES, add_layout, add_limits, add_served, fleet_of
from meshwright.cli.serve_screen import Run, plot, screen
from meshwright.errors import InputError, Problem
from meshwright.observe.bench.serving.figures import parse_objective
from meshwright.policy.ordering import longest_first
from meshwright.predict.serving.fleet import Copies, Fleet, run_fleet
from meshwright.predict.serving.outcome import outcome_of
from meshwright.predict.serving.served import Served
from meshwright.spec.bounds import real, require
from meshwright.spec.model import Model
from meshwright.spec.units import format_some, parse_number
from meshwright.spec.workload import Request

EXAMPLES = (
    "mw simulate serve llama3.1-8b --cluster h200-superpod --rate 10 --prompt 500 --output 200",
    "mw simulate serve llama3.1-70b --cluster h100-superpod --tp 4 --replicas 2 --precision fp8 "
    "--trace requests.jsonl --routing prefix --slo ttft=500ms,itl=40ms",
    "mw simulate serve llama3.1-70b --cluster h100-superpod --tp 4 --disaggregate 1:1 "
    "--rate 1,2,4,8 --prompt 2000 --output 300 --slo ttft=1s,itl=40ms --plot load.svg",
)
COUNT, ATTAIN = 2000, 0.99
_PER_PLACE = 20
"""Requests for each one in flight, where nobody says how many."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw simulate serve MODEL --cluster NAME [requests] [flags]"
    add_served(parser)
    add_request_flags(parser, count=COUNT)
    add_layout(parser)
    add_limits(parser)
    parser.add_argument(
        "--longest-first", action="store_true",
        help="of requests that are all there (--rate inf), those with the longest answers begin "
        "first, as in mw generate",
    )  # fmt: skip
    judged = parser.add_argument_group("what is made of it")
    add_objective(judged)
    judged.add_argument(
        "--timeline", metavar="PATH",
        help="keep steps and requests: a folder for mw timeline, or a .json.gz for Perfetto",
    )  # fmt: skip
    judged.add_argument("--plot", metavar="FILE", help="draw the load over time, as SVG")
    add_common(parser)


def add_objective(group: Any) -> None:
    """Add what requests are held to."""
    group.add_argument(
        "--slo",
        metavar="NAME=TIME,…",
        help="the longest ttft, itl, tpot or e2e: ttft=500ms,itl=40ms",
    )
    group.add_argument(
        "--attain", metavar="SHARE",
        help=f"share of requests that have to keep to it (default: {ATTAIN})",
    )  # fmt: skip


def attain_of(args: argparse.Namespace) -> float:
    """Return the share of requests that have to keep to the objective."""
    if args.attain is None:
        return ATTAIN
    if args.slo is None:
        what = "there is nothing that requests have to keep to"
        raise InputError([Problem("--attain", what, "give --slo ttft=500ms,itl=40ms with it, say")])
    found = parse_number(args.attain, "--attain")
    require(real("--attain", found, 0.0, 1.0))
    return found


def run(args: argparse.Namespace) -> Answer:
    """Answer with what each stream of requests comes to."""
    fleet, attain = fleet_of(args), attain_of(args)
    objective = None if args.slo is None else parse_objective(args.slo, "--slo")
    streams = sized_streams(args)
    if args.timeline and len(streams) > 1:
        fix = "give one rate or concurrency"
        raise InputError([Problem("--timeline", f"there are {len(streams)} runs", fix)])
    runs, beyond = [], []
    for stream in streams:
        requests, left_out = within_context(drawn(stream), fleet.serving.replica.model, args)
        if args.longest_first:
            requests = _longest_first(requests, stream)
        served = run_fleet(fleet, requests, in_flight=stream.in_flight)
        _require_room(served, fleet)
        runs.append(Run(stream.name, served, outcome_of(served, fleet, objective)))
        beyond.append(left_out)
    notes = context_notes(max(beyond), fleet.serving.replica.model)
    if args.timeline:
        _write_timeline(args.timeline, runs[0].served, fleet)
        notes.append(Note(f"wrote {args.timeline}"))
    if args.plot:
        plot(args.plot, runs)
        notes.append(Note(f"wrote {args.plot}"))
    shares = [run.outcome.good_share for run in runs if run.outcome.good_share is not None]
    data = {
        "fleet": fleet_data(fleet),
        "objective": objective,
        "attain": attain if objective else None,
        "runs": [
            {"name": one.name, "beyond_context": count, **msgspec.to_builtins(one.outcome)}
            for one, count in zip(runs, beyond, strict=True)
        ],
    }
    quiet = tuple(f"{one.outcome.output_tokens_per_s:.6g}" for one in runs)
    code = 1 if shares and min(shares) < attain else 0
    views = (*screen(fleet, runs, objective, attain), *notes)
    return Answer("simulate.serve/1", data, views, quiet, code)


def _longest_first(requests: list[Request], stream: Stream) -> list[Request]:
    if stream.rate_per_s != ALL_AT_ONCE:
        what = "requests that come over time begin as they come"
        raise InputError([Problem("--longest-first", what, "give --rate inf, or leave it out")])
    order = longest_first([one.output_tokens for one in requests])
    times = [one.arrival_s for one in requests]
    return [
        msgspec.structs.replace(requests[number], arrival_s=at)
        for number, at in zip(order, times, strict=True)
    ]


def _require_room(served: Served, fleet: Fleet) -> None:
    """Raise where every request is longer than the KV cache."""
    if served.answered.any():
        return
    limits, block = fleet.serving.limits, fleet.serving.limits.block_tokens
    there = min(served.blocks)
    needed = -(-(served.prompt_tokens + served.output_tokens - 1) // block)
    what = (
        f"{there:,} blocks of {block} tokens hold none of the {len(needed):,} requests: "
        f"the shortest takes {needed.min():,}, the longest {needed.max():,}"
    )
    if limits.kv_blocks is not None:
        fix = f"use --kv-blocks {needed.max()}, or leave it out for what the memory holds"
        raise InputError([Problem("--kv-blocks", what, fix)])
    raise InputError([Problem("memory", what, "use a larger --tp or --pp, or fewer bits")])


def sized_streams(args: argparse.Namespace) -> list[Stream]:
    """Return the streams that the flags describe, long enough to settle where nobody says."""
    if args.requests is not None or args.trace is not None:
        return streams_of(args)
    if args.duration is not None:
        found = streams_of(args)
        if any(stream.in_flight is not None for stream in found):
            what = "who is kept in flight has no arrival times to stop at"
            raise InputError([Problem("--duration", what, "give --requests")])
        return found
    args.requests = str(COUNT)
    most = max(stream.in_flight or 0 for stream in streams_of(args))
    args.requests = str(max(COUNT, _PER_PLACE * most))
    return streams_of(args)


def drawn(stream: Stream) -> list[Request]:
    """Return the requests of a stream."""
    found = list(stream.draw())
    if not found:
        what = "no request arrives in that time"
        raise InputError([Problem("--duration", what, "use a longer one, or a higher rate")])
    return found


def within_context(
    requests: list[Request], model: Model, args: argparse.Namespace
) -> tuple[list[Request], int]:
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


def context_notes(beyond: int, model: Model) -> list[Note]:
    """Say how many requests were left out because a model's context does not hold them."""
    if not beyond:
        return []
    many = format_some(beyond, "request is longer", "requests are longer")
    what = f"{many} than the context of {model.name}, {model.max_positions:,} tokens"
    return [Note(f"{what}: an engine refuses them, and they are left out")]


def fleet_data(fleet: Fleet) -> dict[str, Any]:
    """Return a fleet as plain data."""
    replica = fleet.serving.replica
    return {
        "model": replica.model.name,
        "cluster": replica.cluster.name,
        "engine": replica.engine.name,
        "weights": replica.formats.weights,
        "kv": replica.formats.kv,
        "layout": _layout_data(fleet.serving),
        "replicas": fleet.serving.count,
        "prefill_layout": None if fleet.prefill is None else _layout_data(fleet.prefill),
        "prefill_replicas": fleet.prefill.count if fleet.prefill else 0,
        "gpus": fleet.gpus,
        "routing": fleet.routing,
        "limits": msgspec.to_builtins(fleet.serving.limits),
        "prefill_limits": None
        if fleet.prefill is None
        else msgspec.to_builtins(fleet.prefill.limits),
    }


def _layout_data(copies: Copies) -> dict[str, int]:
    """Return the degrees, with how many GPUs every expert is cut over."""
    layout = copies.replica.layout
    degrees = {name: getattr(layout, name) for name in DEGREES}
    return {**degrees, "expert_tp": layout.experts_tp}


def _write_timeline(path: str, served: Served, fleet: Fleet) -> None:
    from meshwright.predict.serving.spans import timeline_of
    from meshwright.timeline import write, write_perfetto

    timeline = timeline_of(served, {"model": fleet.serving.replica.model.name})
    if Path(path).suffix:
        write_perfetto(timeline, path)
    else:
        write(timeline, path)
