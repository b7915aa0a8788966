"""`mw collective list`: the library of algorithms, measured in steps and traffic."""

import argparse

import numpy as np

from meshwright.cli.collective.flags import DEFAULT_RANKS, parse_op
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, View, make_table
from meshwright.errors import InputError, Problem
from meshwright.policy.collective import ALGORITHMS, AlgorithmInfo, Collective, build_algorithm
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.spec.units import parse_count

EXAMPLES = ("mw collective list", "mw collective list --op all_to_all --ranks 16 --per-node 8")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--op", metavar="OP", help="only what does this (default: all)")
    parser.add_argument("--ranks", metavar="N", default=str(DEFAULT_RANKS),
                        help=f"count steps for this many (default: {DEFAULT_RANKS})")  # fmt: skip
    parser.add_argument("--per-node", metavar="N", help="ranks of a node (default: half of them)")
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the library."""
    op = None if args.op is None else parse_op(args.op)
    ranks = parse_count(args.ranks, "--ranks")
    per_node = read_ranks_per_node(args, ranks)
    rows = [
        _row(found, does, ranks, per_node)
        for found in ALGORITHMS
        for does in found.ops
        if op in (None, does)
    ]
    view = _library() if op is None else _figures(rows, ranks, per_node)
    note = NoteView("--op OP shows steps and traffic; mw collective show NAME draws one")
    names = tuple(dict.fromkeys(str(row["name"]) for row in rows))
    return CommandResult(
        "collective.list/1", {"ranks": ranks, "algorithms": rows}, (view, note), names
    )


def read_ranks_per_node(args: argparse.Namespace, ranks: int) -> int:
    """Return the ranks of a node: what was asked for, or half of them."""
    asked = None if args.per_node is None else parse_count(args.per_node, "--per-node")
    if ranks < 1 or asked == 0:
        flag = "--ranks" if ranks < 1 else "--per-node"
        raise InputError([Problem(flag, "is 0", "use 1 or more")])
    return max(1, ranks // 2) if asked is None else asked


def _library() -> View:
    shown = [(found.name, ", ".join(found.ops), found.summary) for found in ALGORITHMS]
    return make_table("algorithm, operations, how", shown, wide="operations, how")


def _figures(rows: list[dict[str, object]], ranks: int, per_node: int) -> View:
    shown = [
        (row["name"], row["steps"], "" if row["sent"] is None else f"{row['sent']:.2f}",
         row.get("refused") or row["summary"])
        for row in rows
    ]  # fmt: skip
    title = f"{ranks} ranks in nodes of {per_node}; sent: by the busiest rank, in messages"
    return make_table("algorithm, steps, sent, how", shown, title, right="steps, sent", wide="how")


def _row(found: AlgorithmInfo, op: CollectiveOp, ranks: int, per_node: int) -> dict[str, object]:
    data: dict[str, object] = {
        "name": found.name,
        "title": found.title,
        "op": op,
        "summary": found.summary,
        "needs": list(found.needs),
        "steps": None,
        "sent": None,
    }
    try:
        built = build_sample(found, op, ranks, per_node)
    except InputError as error:
        return {**data, "refused": error.problems[0].what}
    return {**data, "steps": built.steps, "sent": max_bytes_sent(built)}


def build_sample(found: AlgorithmInfo, op: CollectiveOp, ranks: int, per_node: int) -> Collective:
    """Build an algorithm with what each operation needs filled in plainly."""
    counts = [[1] * ranks for _ in range(ranks)] if op == "all_to_all_v" else None
    peers = [(rank + 1) % ranks for rank in range(ranks)] if op == "send_recv" else None
    pods = 2 if "nodes_per_pod" in found.needs else None
    nodes = per_node if pods is None else max(1, ranks // 4)
    return build_algorithm(
        found.name, op, ranks, per_node=nodes, nodes_per_pod=pods, counts=counts, peers=peers
    )


def max_bytes_sent(collective: Collective) -> float:
    """Return how many times the message the busiest rank sends to others."""
    sent = np.zeros(collective.num_endpoints)
    for sweep in collective.sweeps:
        # A sweep sends as much each time, so its first time stands for all of them.
        moves = sweep.moves
        away = moves.src != moves.dst
        np.add.at(sent, moves.src[away], moves.count[away] * sweep.span)
    whole = collective.chunks
    if collective.op == "all_to_all_v":
        whole = max((sum(row) for row in collective.counts), default=0) or 1
    return float(sent[: collective.ranks].max()) / whole
