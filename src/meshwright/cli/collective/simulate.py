"""`mw collective simulate`: how long collectives take on a cluster, whole or with broken parts."""

import argparse
from typing import Any

from meshwright.cli.collective.explain import parse_nccl_op
from meshwright.cli.collective.flags import (
    CollectiveTarget,
    add_algorithm,
    add_cluster,
    add_failures,
    add_size,
    build_collective,
    is_collective_file,
    is_link,
    parse_op,
    read_size,
    read_target,
    remove_failed_links,
    require_verified,
)
from meshwright.cli.collective.link_loads import (
    group_link_loads,
    render_link_loads,
    write_link_loads,
)
from meshwright.cli.parser import add_common
from meshwright.cli.render.files import write_text
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.policy.collective.formats import write_collective_json
from meshwright.policy.collective.phase_pipelining import pipeline_phases
from meshwright.predict.collective import (
    RankedAlgorithm,
    SimulatedCollective,
    predict_nccl,
    rank_algorithms,
    replan_after_failure,
    simulate_collective,
)
from meshwright.spec.units import format_bytes, format_rate, format_seconds, parse_count
from meshwright.timeline import write_perfetto

EXAMPLES = (
    "mw collective simulate --cluster h100-superpod --gpus 16 --size 64MiB",
    "mw collective simulate nccl --cluster h100-superpod --gpus 128 --size 64MiB",
    "mw collective simulate ring --channels 8 --cluster h100-superpod --gpus 1024 --size 1GiB",
    "mw collective simulate --cluster h100-superpod --gpus 16 --kill node0.nic3",
    "mw collective simulate two_level --cluster h100-superpod --gpus 16 --timeline moves.json.gz",
)

MAX_CHUNKS = 4096
"""Parts of a message beyond which nothing is gained and the moves become too many."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_algorithm(parser, optional=True)
    add_size(parser)
    parser.add_argument("--parts", metavar="N", help="cut the message into parts that follow on")
    add_failures(parser)
    parser.add_argument("--out", metavar="FILE", help="with --kill: write the new schedule (.json)")
    parser.add_argument("--timeline", metavar="FILE", help="write every move for Perfetto")
    parser.add_argument("--loads", metavar="FILE", help="write what each link carries as a picture")
    add_cluster(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with one collective, with all that would do, or with what is left of them."""
    on, size = read_target(args), read_size(args)
    assert on is not None
    if args.kill and args.name is None:
        return _broken(args, on, size)
    if args.name is None:
        return _compared(args, on, size)
    if args.name == "nccl":
        return _nccl(args, on, size)
    found = require_verified(args, build_collective(args, on))
    if args.out:
        raise InputError([Problem("--out", "goes with --kill", "use mw collective export")])
    if args.parts is not None:
        parts = parse_count(args.parts, "--parts")
        if not 1 <= parts <= MAX_CHUNKS:
            raise InputError([Problem("--parts", f"is {parts}", f"use 1 to {MAX_CHUNKS}")])
        found = pipeline_phases(found, parts)
    system = remove_failed_links(on, args.kill) if args.kill else on.cluster
    result = simulate_collective(found, system, size, keep_moves=args.timeline is not None)
    notes: list[View] = []
    if args.parts is None and args.channels == "1" and not is_collective_file(args.name):
        notes.append(
            NoteView("without a name, more channels (--channels) and --parts are tried too")
        )
    if args.timeline:
        write_perfetto(result.build_timeline(), args.timeline)
        notes.append(NoteView(f"wrote {args.timeline}: open it at ui.perfetto.dev"))
    loads = group_link_loads(result)
    if args.loads:
        write_link_loads(args.loads, found, loads)
        notes.append(NoteView(f"wrote {args.loads}"))
    views = (make_fields(_figures(result)), render_link_loads(loads), *notes)
    data = {**_data(result), "links": [load._asdict() for load in loads]}
    return CommandResult("collective.simulate/2", data, views, (f"{result.seconds:.6g}",))


def _nccl(args: argparse.Namespace, on: CollectiveTarget, size: int) -> CommandResult:
    """Simulate what NCCL would run."""
    if args.timeline or args.loads or args.parts or args.kill:
        what = "what NCCL would run is simulated as a whole"
        fix = "name an algorithm of mw collective list for --timeline, --loads, --parts and --kill"
        raise InputError([Problem("ALGORITHM", what, fix)])
    op = parse_nccl_op(args.op or "all_reduce")
    result = predict_nccl(on.cluster, op, size, range(on.gpus))
    data = {**_data(result), "costs": result.costs}
    views: list[View] = [make_fields({"NCCL's choice": result.costs, **_figures(result)})]
    if op in ("broadcast", "reduce"):
        views.append(
            NoteView(f"{op} counts every hop of the ring, far later than NCCL's own model")
        )
    return CommandResult("collective.simulate/2", data, tuple(views), (f"{result.seconds:.6g}",))


def _figures(result: SimulatedCollective) -> dict[str, object]:
    bottleneck = result.bottleneck
    return {
        "algorithm": f"{result.algorithm} {result.op}, {result.ranks} ranks on {result.network}",
        "message": format_bytes(result.nbytes),
        "time": format_seconds(result.seconds),
        "bandwidth": f"{format_rate(result.algbw_bytes_per_s)} of the message, "
        f"{format_rate(result.busbw_bytes_per_s)} on the bus",
        "least time the wires allow": format_seconds(result.bound_s) if result.bound_s else None,
        "steps": f"{result.steps:,} with {result.moves:,} moves",
        "bottleneck": bottleneck
        and f"{bottleneck.link}, busy {bottleneck.utilization:.0%} of the time",
    }


def _data(result: SimulatedCollective) -> dict[str, Any]:
    bottleneck = result.bottleneck
    return {
        "algorithm": result.algorithm,
        "op": result.op,
        "ranks": result.ranks,
        "size_bytes": result.nbytes,
        "seconds": result.seconds,
        "bound_s": result.bound_s,
        "algbw_bytes_per_s": result.algbw_bytes_per_s,
        "busbw_bytes_per_s": result.busbw_bytes_per_s,
        "steps": result.steps,
        "moves": result.moves,
        "bottleneck": None if bottleneck is None else bottleneck.link,
    }


def _compared(args: argparse.Namespace, on: CollectiveTarget, size: int) -> CommandResult:
    """Compare every algorithm of the library that does the operation."""
    op = parse_op(args.op or "all_reduce")
    if op in ("send_recv", "all_to_all_v"):
        what = f"{op} depends on who sends what to whom"
        fix = f"name an algorithm: mw collective list --op {op} shows them"
        raise InputError([Problem("--op", what, fix)])
    found = rank_algorithms(on.cluster, op, size, members=range(on.gpus))
    rows = [
        (one.name, one.channels, one.message_parts, format_seconds(one.seconds),
         format_rate(one.result.busbw_bytes_per_s), _of_bound(one.result), one.result.steps,
         one.result.bottleneck.link if one.result.bottleneck else "")
        for one in found
    ]  # fmt: skip
    title = f"{op} of {format_bytes(size)} over {on.gpus} GPUs of {on.cluster.name}, fastest first"
    view = make_table(
        "algorithm, channels, parts, time, busbw, of bound, steps, busiest link", rows, title,
        right="channels, parts, time, busbw, of bound, steps",
    )  # fmt: skip
    note = NoteView(
        "wires and their latencies alone (ALGORITHM nccl: what NCCL would run); of bound: the "
        "least time that these wires allow, less where switches can add"
    )
    quiet = tuple(f"{one.name}\t{one.seconds:.6g}" for one in found)
    data = {"results": [_ranked(one) for one in found]}
    return CommandResult("collective.compare/1", data, (view, note), quiet)


def _of_bound(result: SimulatedCollective) -> str:
    return f"{result.bound_s / result.seconds:.0%}" if result.bound_s else ""


def _ranked(one: RankedAlgorithm) -> dict[str, Any]:
    return {**_data(one.result), "channels": one.channels, "parts": one.message_parts}


def _broken(args: argparse.Namespace, on: CollectiveTarget, size: int) -> CommandResult:
    """Plan around what is broken, and say what it costs."""
    op = parse_op(args.op or "all_reduce")
    whole = remove_failed_links(on, ())
    left = {vertex.name for vertex in remove_failed_links(on, args.kill).vertices}
    # A whole node is many parts; a link is itself.
    gone = [vertex.name for vertex in whole.vertices if vertex.name not in left]
    found = replan_after_failure(
        whole, op, size, [*gone, *(part for part in args.kill if is_link(part))]
    )
    rows = [("before", *_way(found.before))]
    if found.rerouted is not None:
        rows.append(("the same, led around it", *_way(found.rerouted)))
    rows.append(("planned anew", *_way(found.after)))
    notes: list[View] = [
        NoteView("sums inside switches (nvls, sharp) are not tried around failures")
    ]
    if args.out:
        write_text(args.out, write_collective_json(found.after.collective))
        notes.append(NoteView(f"wrote {args.out}: mw collective show {args.out} reads it"))
    lost = [rank for rank in range(on.gpus) if rank not in found.surviving_ranks]
    head = {
        "broken": ", ".join(args.kill),
        "ranks left": f"{len(found.surviving_ranks)} of {on.gpus}" if lost else None,
        "loss": f"{found.slowdown:+.1%} of the time of {op} of {format_bytes(size)}",
        "schedule": f"{found.after.name}, {found.after.collective.steps} steps",
    }
    view = make_table("when, algorithm, time, busbw, busiest link", rows, right="time, busbw")
    data = {
        "broken": list(found.failed),
        "ranks": list(found.surviving_ranks),
        "loss": found.slowdown,
        "before": _ranked(found.before),
        "kept": None if found.rerouted is None else _ranked(found.rerouted),
        "after": _ranked(found.after),
    }
    quiet = (f"{found.slowdown:.6g}",)
    return CommandResult("collective.replan/1", data, (make_fields(head), view, *notes), quiet)


def _way(one: RankedAlgorithm) -> tuple[str, ...]:
    result = one.result
    busiest = result.bottleneck.link if result.bottleneck else ""
    rate = format_rate(result.busbw_bytes_per_s)
    return one.name, format_seconds(one.seconds), rate, busiest
