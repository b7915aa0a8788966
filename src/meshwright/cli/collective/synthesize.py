"""`mw collective synthesize`: a schedule made for a topology, also for one with broken links."""

import argparse
import time
from typing import Any, cast

from meshwright.cli.collective.flags import (
    add_cluster,
    add_failures,
    parse_op,
    read_target,
    remove_failed_links,
)
from meshwright.cli.parser import add_common
from meshwright.cli.render.files import write_text
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.policy.collective import verify_collective
from meshwright.policy.collective.formats import write_collective_json
from meshwright.policy.collective.synthesis import SynthesizedCollective, synthesize
from meshwright.policy.collective.synthesis.synthesis import SynthesisGoal
from meshwright.spec.units import format_rate, format_seconds, parse_count

EXAMPLES = (
    "mw collective synthesize --cluster h100-superpod --gpus 16",
    "mw collective synthesize --cluster azure-nd-mi300x-v5 --kill gpu0~gpu1 --out mine.json",
)
_SHOWN = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--op", metavar="OP", default="all_reduce", help="default: all_reduce")
    parser.add_argument("--goal", choices=("bandwidth", "latency"), default="bandwidth",
                        help="full links, or few rounds for small messages")  # fmt: skip
    parser.add_argument("--root", metavar="RANK", default="0", help="for broadcast and reduce")
    parser.add_argument("--pieces", metavar="N", help="chunks that stream through each tree")
    add_failures(parser)
    parser.add_argument("--out", metavar="FILE", help="write the schedule (.json)")
    add_cluster(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the schedule, its rate and the cut that bounds it."""
    on = read_target(args)
    assert on is not None
    graph = remove_failed_links(on, args.kill)
    start = time.perf_counter()
    found = synthesize(
        graph,
        parse_op(args.op),
        root=parse_count(args.root, "--root"),
        goal=cast(SynthesisGoal, args.goal),
        pieces=None if args.pieces is None else parse_count(args.pieces, "--pieces"),
    )
    seconds = time.perf_counter() - start
    proof = verify_collective(found.collective)
    notes: list[View] = [NoteView(note) for note in found.notes]
    if args.out:
        write_text(args.out, write_collective_json(found.collective))
        notes.append(NoteView(f"wrote {args.out}: mw collective show {args.out} reads it"))
    views: list[View] = [make_fields(_figures(found, seconds, proof.is_correct))]
    if found.trees:
        views.append(_trees(found))
    data = _data(found, proof.is_correct, seconds)
    return CommandResult("collective.synthesize/2", data, (*views, *notes),
                  (f"{found.rate_bytes_per_s:.6g}",), 0 if proof.is_correct else 1)  # fmt: skip


def _figures(found: SynthesizedCollective, seconds: float, sound: bool) -> dict[str, object]:
    made = found.collective
    return {
        "schedule": f"{made.op} over {made.ranks} GPUs, for {found.goal}",
        "rate": f"{format_rate(found.rate_bytes_per_s)}, {found.bound_share:.1%} of what is "
        f"possible",
        "bound": found.bound.reason,
        "busiest link": "→".join(found.link_loads.busiest_link),
        "trees": len(found.trees) or None,
        "chunks": f"{made.chunks:,} in {made.steps:,} steps",
        "proved": "yes" if sound else "no",
        "took": format_seconds(seconds),
    }


def _trees(found: SynthesizedCollective) -> View:
    order = sorted(found.trees, key=lambda tree: -tree.weight)
    rows = [
        (found.members[tree.root], f"{tree.weight:.1%}", _edges(found, tree.edges))
        for tree in order[:_SHOWN]
    ]
    more = f", the first {_SHOWN} of {len(order)}" if len(order) > _SHOWN else ""
    return make_table("root, share, edges", rows, f"trees{more}", right="share", wide="edges")


def _edges(found: SynthesizedCollective, edges: tuple[tuple[int, int], ...]) -> str:
    said = [f"{found.members[parent]}→{found.members[child]}" for parent, child in edges[:8]]
    return "  ".join(said) + (f"  and {len(edges) - 8} more" if len(edges) > 8 else "")


def _data(found: SynthesizedCollective, sound: bool, seconds: float) -> dict[str, Any]:
    return {
        "op": found.collective.op,
        "members": list(found.members),
        "goal": found.goal,
        "rate_bytes_per_s": found.rate_bytes_per_s,
        "bound_bytes_per_s": found.bound.rate_bytes_per_s,
        "of_bound": found.bound_share,
        "bound": found.bound.reason,
        "cut": [list(part) for part in found.bound.cut_partition],
        "busiest": list(found.link_loads.busiest_link),
        "trees": [
            {"root": tree.root, "weight": tree.weight, "edges": [list(e) for e in tree.edges]}
            for tree in found.trees
        ],
        "chunks": found.collective.chunks,
        "steps": found.collective.steps,
        "sound": sound,
        "seconds": seconds,
    }
