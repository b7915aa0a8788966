"""`mw collective simulate`: how long collectives take on a cluster, whole or with broken parts."""

import argparse
from typing import Any

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.collective_loads import loads_of, loads_view, write_loads
from meshwright.cli.collective_source import (
    Target,
    add_algorithm,
    add_cluster,
    add_size,
    collective_of,
    op_of,
    size_of,
    target,
)
from meshwright.cli.parser import add_common
from meshwright.predict.collective import Replan, Simulated, best, replan, simulate
from meshwright.spec.units import format_bytes, format_rate, format_seconds
from meshwright.timeline import write_perfetto

EXAMPLES = (
    "mw collective simulate --cluster h100-superpod --gpus 16 --size 64MiB",
    "mw collective simulate ring --channels 8 --cluster h100-superpod --gpus 1024 --size 1GiB",
    "mw collective simulate --cluster h100-superpod --gpus 16 --kill node0.nic3",
    "mw collective simulate two_level --cluster h100-superpod --gpus 16 --timeline moves.json.gz",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_algorithm(parser, optional=True)
    add_size(parser)
    parser.add_argument("--kill", metavar="PART", action="append", default=[],
                        help="a broken part: gpu3, node0.nic2, or a link such as gpu0-gpu1")  # fmt: skip
    parser.add_argument("--timeline", metavar="FILE", help="write every move for Perfetto")
    parser.add_argument("--loads", metavar="FILE", help="write what each link carries as a picture")
    add_cluster(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with one collective, with all that would do, or with what is left of them."""
    on, size = target(args), size_of(args)
    assert on is not None
    if args.kill:
        return _broken(args, on, size)
    if args.name is None:
        return _compared(args, on, size)
    found = collective_of(args, on)
    result = simulate(found, on.cluster, size, keep_moves=args.timeline is not None)
    notes: list[View] = []
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
    results = best(on.cluster, op, size, members=range(on.gpus))
    rows = [
        (result.algorithm, format_seconds(result.seconds), format_rate(result.busbw_bytes_per_s),
         f"{result.bound_s / result.seconds:.0%}" if result.bound_s else "",
         result.steps, result.bottleneck.link if result.bottleneck else "")
        for result in results
    ]  # fmt: skip
    title = f"{op} of {format_bytes(size)} over {on.gpus} GPUs of {on.cluster.name}, fastest first"
    view = table(
        "algorithm, time, bus bandwidth, of the bound, steps, busiest link", rows, title,
        right="time, bus bandwidth, of the bound, steps",
    )  # fmt: skip
    note = Note("wires and their latencies alone; mw collective explain says what NCCL picks")
    quiet = tuple(f"{result.algorithm}\t{result.seconds:.6g}" for result in results)
    data = {"results": [_data(result) for result in results]}
    return Answer("collective.compare/1", data, (view, note), quiet)


def _broken(args: argparse.Namespace, on: Target, size: int) -> Answer:
    """Plan around what is broken, and say what it costs."""
    op = op_of(args.op or "all_reduce")
    found: Replan = replan(on.cluster, op, size, args.kill, members=range(on.gpus))
    raise NotImplementedError(found)
