"""`mw collective show`: an algorithm step by step, as text and as a picture."""

import argparse
from collections import defaultdict

from meshwright.cli import collective_svg
from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.collective_list import most_sent
from meshwright.cli.collective_loads import link_loads, loads_view, write_loads
from meshwright.cli.collective_source import (
    add_algorithm,
    add_cluster,
    add_size,
    collective_of,
    proved,
    size_of,
    target,
)
from meshwright.cli.files import write_text
from meshwright.cli.parser import add_common
from meshwright.errors import InputError, Problem
from meshwright.policy.collective import Collective, Moves

EXAMPLES = (
    "mw collective show ring --ranks 4",
    "mw collective show double_tree --ranks 8 --svg tree.svg",
    "mw collective show ring --graph nccl_graph.xml --svg rings.svg",
    "mw collective show two_level --cluster h100-superpod --gpus 16 --svg moves.svg --loads l.svg",
)
_MOST_STEPS, _MOST_MOVES = 24, 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_algorithm(parser)
    add_size(parser)
    parser.add_argument("--svg", metavar="FILE", help="write the moves as a picture")
    parser.add_argument("--loads", metavar="FILE", help="write what each link carries as a picture")
    add_cluster(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the steps, and with the load of each link where a cluster is named."""
    on = target(args, needed=bool(args.loads))
    found = collective_of(args, on)
    notes: list[View] = []
    for flag, path in (("--svg", args.svg), ("--loads", args.loads)):
        if path and not path.lower().endswith(".svg"):
            raise InputError([Problem(flag, f"{path} is no .svg file", "end it in .svg")])
    if args.svg:
        picture, left_out = collective_svg.schedule(found)
        write_text(args.svg, picture)
        missing = f" without {left_out}" if left_out else ""
        notes.append(Note(f"wrote {args.svg}{missing}"))
    steps = [_step(step, moves, found) for step, moves in _first(found)]
    data = {**outline(found), "shown_steps": steps}
    rows = [(step["step"], step["moves"], step["what"]) for step in steps]
    views: list[View] = [
        facts(_words(found)),
        table("step, moves, what happens", rows, right="step, moves", wide="what happens"),
    ]
    if found.steps > len(steps):
        notes.append(Note(f"{found.steps - len(steps)} more steps are not shown"))
    if on is not None:
        loads = link_loads(proved(args, found), on, size_of(args))
        views.append(loads_view(loads))
        data["links"] = [load._asdict() for load in loads]
        if args.loads:
            write_loads(args.loads, found, loads)
            notes.append(Note(f"wrote {args.loads}"))
    return Answer("collective.show/1", data, (*views, *notes), (str(found.steps),))


def outline(found: Collective) -> dict[str, object]:
    """Return a collective in a few figures."""
    return {
        "algorithm": found.name,
        "op": found.op,
        "ranks": found.ranks,
        "switches": ", ".join(found.switches) or None,
        "chunks": found.chunks,
        "slots_of_a_rank": found.slots,
        "channels": found.channels,
        "steps": found.steps,
        "moves": found.moves,
        "most_sent_messages": round(most_sent(found), 6),
    }


def _words(found: Collective) -> dict[str, object]:
    plain = {key.replace("_", " "): value for key, value in outline(found).items()}
    plain["sent by the busiest rank"] = f"{plain.pop('most sent messages')} × the message"
    return plain


def _first(found: Collective) -> list[tuple[int, Moves]]:
    kept = []
    for step, moves in found.walk():
        if step >= _MOST_STEPS:
            break
        kept.append((step, moves))
    return kept


def _step(step: int, moves: Moves, found: Collective) -> dict[str, object]:
    groups: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for row in range(len(moves)):
        first, count = int(moves.src_slot[row]), int(moves.count[row])
        key = (int(moves.src[row]), int(moves.dst[row]), int(moves.adds[row]))
        groups[key].append(str(first) if count == 1 else f"{first}–{first + count - 1}")
    said = []
    for (src, dst, adds), chunks in list(groups.items())[:_MOST_MOVES]:
        listed = ",".join(chunks[:4]) + (",…" if len(chunks) > 4 else "")
        arrow = "⊕→" if adds else "→"
        said.append(f"{_short(found, src)}{arrow}{_short(found, dst)} [{listed}]")
    if len(groups) > _MOST_MOVES:
        said.append(f"and {len(groups) - _MOST_MOVES} more")
    return {"step": step, "moves": len(moves), "what": "  ".join(said)}


def _short(found: Collective, place: int) -> str:
    return str(place) if place < found.ranks else found.place_name(place)
