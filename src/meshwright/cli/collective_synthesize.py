"""`mw collective synthesize`: a schedule made for a topology, also for one with broken links."""

import argparse
import time
from typing import Any, cast

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.collective_source import add_cluster, add_kill, broken, op_of, target
from meshwright.cli.files import write_text
from meshwright.cli.parser import add_common
from meshwright.policy.collective import verify
from meshwright.policy.collective.formats import write_plain
from meshwright.policy.collective.synthesis import Synthesis, synthesize
from meshwright.policy.collective.synthesis.synthesis import Aim
from meshwright.spec.units import format_rate, format_seconds, parse_count

EXAMPLES = (
    "mw collective synthesize --cluster h100-superpod --gpus 16",
    "mw collective synthesize --cluster azure-nd-mi300x-v5 --kill gpu0~gpu1 --out mine.json",
)
_SHOWN = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--op", metavar="OP", default="all_reduce", help="default: all_reduce")
    parser.add_argument("--aim", choices=("bandwidth", "latency"), default="bandwidth",
                        help="full links, or few rounds for small messages")  # fmt: skip
    parser.add_argument("--root", metavar="RANK", default="0", help="for broadcast and reduce")
    parser.add_argument("--pieces", metavar="N", help="chunks that stream through each tree")
    add_kill(parser)
    parser.add_argument("--out", metavar="FILE", help="write the schedule (.json)")
    add_cluster(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the schedule, its rate and the cut that bounds it."""
    on = target(args)
    assert on is not None
    graph = broken(on, args.kill)
    start = time.perf_counter()
    found = synthesize(
        graph,
        op_of(args.op),
        root=parse_count(args.root, "--root"),
        aim=cast(Aim, args.aim),
        pieces=None if args.pieces is None else parse_count(args.pieces, "--pieces"),
    )
    seconds = time.perf_counter() - start
    proof = verify(found.collective)
    notes: list[View] = [Note(note) for note in found.notes]
    if args.out:
        write_text(args.out, write_plain(found.collective))
        notes.append(Note(f"wrote {args.out}: mw collective show {args.out} reads it"))
    views: list[View] = [facts(_figures(found, seconds, proof.sound))]
    if found.trees:
        views.append(_trees(found))
    data = _data(found, proof.sound, seconds)
    return Answer("collective.synthesize/1", data, (*views, *notes),
                  (f"{found.rate_bytes_per_s:.6g}",), 0 if proof.sound else 1)  # fmt: skip


def _figures(found: Synthesis, seconds: float, sound: bool) -> dict[str, object]:
    made = found.collective
    return {
        "schedule": f"{made.op} over {made.ranks} GPUs, for {found.aim}",
        "rate": f"{format_rate(found.rate_bytes_per_s)}, {found.of_bound:.1%} of what is possible",
        "bound": found.bound.reason,
        "busiest link": "→".join(found.loads.busiest),
        "trees": len(found.trees) or None,
        "chunks": f"{made.chunks:,} in {made.steps:,} steps",
        "proved": "yes" if sound else "no",
        "took": format_seconds(seconds),
    }


def _trees(found: Synthesis) -> View:
    order = sorted(found.trees, key=lambda tree: -tree.weight)
    rows = [
        (found.members[tree.root], f"{tree.weight:.1%}", _edges(found, tree.edges))
        for tree in order[:_SHOWN]
    ]
    more = f", the first {_SHOWN} of {len(order)}" if len(order) > _SHOWN else ""
    return table("root, share, edges", rows, f"trees{more}", right="share", wide="edges")


def _edges(found: Synthesis, edges: tuple[tuple[int, int], ...]) -> str:
    said = [f"{found.members[parent]}→{found.members[child]}" for parent, child in edges[:8]]
    return "  ".join(said) + (f"  and {len(edges) - 8} more" if len(edges) > 8 else "")


def _data(found: Synthesis, sound: bool, seconds: float) -> dict[str, Any]:
    return {
        "op": found.collective.op,
        "members": list(found.members),
        "aim": found.aim,
        "rate_bytes_per_s": found.rate_bytes_per_s,
        "bound_bytes_per_s": found.bound.rate_bytes_per_s,
        "of_bound": found.of_bound,
        "bound": found.bound.reason,
        "cut": [list(part) for part in found.bound.parts],
        "busiest": list(found.loads.busiest),
        "trees": [
            {"root": tree.root, "weight": tree.weight, "edges": [list(e) for e in tree.edges]}
            for tree in found.trees
        ],
        "chunks": found.collective.chunks,
        "steps": found.collective.steps,
        "sound": sound,
        "seconds": seconds,
    }
