"""`mw collective simulate`: how long collectives take on a cluster, whole or with broken parts."""

import argparse
from typing import Any

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.collective_explain import nccl_op
from meshwright.cli.collective_loads import loads_of, loads_view, write_loads
from meshwright.cli.collective_source import (
    Target,
    add_algorithm,
    add_cluster,
    add_kill,
    add_size,
    broken,
    collective_of,
    is_file,
    is_link,
    op_of,
    proved,
    size_of,
    target,
)
from meshwright.cli.files import write_text
from meshwright.cli.parser import add_common
from meshwright.errors import InputError, Problem
from meshwright.policy.collective.formats import write_plain
from meshwright.policy.collective.streaming import streamed
from meshwright.predict.collective import (
    Ranked,
    Simulated,
    predict_nccl,
    rank,
    replan,
    simulate,
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

MOST_PARTS = 4096
"""Parts of a message beyond which nothing is gained and the moves become too many."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_algorithm(parser, optional=True)
    add_size(parser)
    parser.add_argument("--parts", metavar="N", help="cut the message into parts that follow on")
    add_kill(parser)
    parser.add_argument("--out", metavar="FILE", help="with --kill: write the new schedule (.json)")
    parser.add_argument("--timeline", metavar="FILE", help="write every move for Perfetto")
    parser.add_argument("--loads", metavar="FILE", help="write what each link carries as a picture")
    add_cluster(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with one collective, with all that would do, or with what is left of them."""
    on, size = target(args), size_of(args)
    assert on is not None
    if args.kill and args.name is None:
        return _broken(args, on, size)
    if args.name is None:
        return _compared(args, on, size)
    if args.name == "nccl":
        return _nccl(args, on, size)
    found = proved(args, collective_of(args, on))
    if args.out:
        raise InputError([Problem("--out", "goes with --kill", "use mw collective export")])
    if args.parts is not None:
        parts = parse_count(args.parts, "--parts")
        if not 1 <= parts <= MOST_PARTS:
            raise InputError([Problem("--parts", f"is {parts}", f"use 1 to {MOST_PARTS}")])
        found = streamed(found, parts)
    system = broken(on, args.kill) if args.kill else on.cluster
    result = simulate(found, system, size, keep_moves=args.timeline is not None)
    notes: list[View] = []
    if args.parts is None and args.channels == "1" and not is_file(args.name):
        notes.append(Note("without a name, more channels (--channels) and --parts are tried too"))
    if args.timeline:
        write_perfetto(result.timeline(), args.timeline)
        notes.append(Note(f"wrote {args.timeline}: open it at ui.perfetto.dev"))
    loads = loads_of(result)
    if args.loads:
        write_loads(args.loads, found, loads)
        notes.append(Note(f"wrote {args.loads}"))
    views = (facts(_figures(result)), loads_view(loads), *notes)
    data = {**_data(result), "links": [load._asdict() for load in loads]}
    return Answer("collective.simulate/1", data, views, (f"{result.seconds:.6g}",))


def _nccl(args: argparse.Namespace, on: Target, size: int) -> Answer:
    """Simulate what NCCL would run."""
    if args.timeline or args.loads or args.parts or args.kill:
        what = "what NCCL would run is simulated as a whole"
        fix = "name an algorithm of mw collective list for --timeline, --loads, --parts and --kill"
        raise InputError([Problem("ALGORITHM", what, fix)])
    op = nccl_op(args.op or "all_reduce")
    result = predict_nccl(on.cluster, op, size, range(on.gpus))
    data = {**_data(result), "costs": result.costs}
    views: list[View] = [facts({"NCCL's choice": result.costs, **_figures(result)})]
    if op in ("broadcast", "reduce"):
        views.append(Note(f"{op} counts every hop of the ring, far later than NCCL's own model"))
    return Answer("collective.simulate/1", data, tuple(views), (f"{result.seconds:.6g}",))


def _figures(result: Simulated) -> dict[str, object]:
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
        and f"{bottleneck.link}, busy {bottleneck.utilisation:.0%} of the time",
    }


def _data(result: Simulated) -> dict[str, Any]:
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


def _compared(args: argparse.Namespace, on: Target, size: int) -> Answer:
    """Compare every algorithm of the library that does the operation."""
    op = op_of(args.op or "all_reduce")
    if op in ("send_recv", "all_to_all_v"):
        what = f"{op} depends on who sends what to whom"
        fix = f"name an algorithm: mw collective list --op {op} shows them"
        raise InputError([Problem("--op", what, fix)])
    found = rank(on.cluster, op, size, members=range(on.gpus))
    rows = [
        (one.name, one.channels, one.parts, format_seconds(one.seconds),
         format_rate(one.result.busbw_bytes_per_s), _of_bound(one.result), one.result.steps,
         one.result.bottleneck.link if one.result.bottleneck else "")
        for one in found
    ]  # fmt: skip
    title = f"{op} of {format_bytes(size)} over {on.gpus} GPUs of {on.cluster.name}, fastest first"
    view = table(
        "algorithm, channels, parts, time, busbw, of bound, steps, busiest link", rows, title,
        right="channels, parts, time, busbw, of bound, steps",
    )  # fmt: skip
    note = Note(
        "wires and their latencies alone (ALGORITHM nccl: what NCCL would run); of bound: the "
        "least time that these wires allow, less where switches can add"
    )
    quiet = tuple(f"{one.name}\t{one.seconds:.6g}" for one in found)
    data = {"results": [_ranked(one) for one in found]}
    return Answer("collective.compare/1", data, (view, note), quiet)


def _of_bound(result: Simulated) -> str:
    return f"{result.bound_s / result.seconds:.0%}" if result.bound_s else ""


def _ranked(one: Ranked) -> dict[str, Any]:
    return {**_data(one.result), "channels": one.channels, "parts": one.parts}


def _broken(args: argparse.Namespace, on: Target, size: int) -> Answer:
    """Plan around what is broken, and say what it costs."""
    op = op_of(args.op or "all_reduce")
    whole = broken(on, ())
    left = {vertex.name for vertex in broken(on, args.kill).vertices}
    # A whole node is many parts; a link is itself.
    gone = [vertex.name for vertex in whole.vertices if vertex.name not in left]
    found = replan(whole, op, size, [*gone, *(part for part in args.kill if is_link(part))])
    rows = [("before", *_way(found.before))]
    if found.kept is not None:
        rows.append(("the same, led around it", *_way(found.kept)))
    rows.append(("planned anew", *_way(found.after)))
    notes: list[View] = [Note("sums inside switches (nvls, sharp) are not tried around failures")]
    if args.out:
        write_text(args.out, write_plain(found.after.collective))
        notes.append(Note(f"wrote {args.out}: mw collective show {args.out} reads it"))
    lost = [rank for rank in range(on.gpus) if rank not in found.ranks]
    head = {
        "broken": ", ".join(args.kill),
        "ranks left": f"{len(found.ranks)} of {on.gpus}" if lost else None,
        "loss": f"{found.loss:+.1%} of the time of {op} of {format_bytes(size)}",
        "schedule": f"{found.after.name}, {found.after.collective.steps} steps",
    }
    view = table("when, algorithm, time, busbw, busiest link", rows, right="time, busbw")
    data = {
        "broken": list(found.dead),
        "ranks": list(found.ranks),
        "loss": found.loss,
        "before": _ranked(found.before),
        "kept": None if found.kept is None else _ranked(found.kept),
        "after": _ranked(found.after),
    }
    quiet = (f"{found.loss:.6g}",)
    return Answer("collective.replan/1", data, (facts(head), view, *notes), quiet)


def _way(one: Ranked) -> tuple[str, ...]:
    result = one.result
    busiest = result.bottleneck.link if result.bottleneck else ""
    rate = format_rate(result.busbw_bytes_per_s)
    return one.name, format_seconds(one.seconds), rate, busiest
