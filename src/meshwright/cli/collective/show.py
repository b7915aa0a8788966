"""`mw collective show`: an algorithm step by step, as text and as a picture."""

import argparse
from collections import defaultdict

from meshwright.cli.collective import schedule_svg
from meshwright.cli.collective.flags import (
    add_algorithm,
    add_cluster,
    add_size,
    build_collective,
    read_size,
    read_target,
    require_verified,
)
from meshwright.cli.collective.link_loads import (
    compute_link_loads,
    render_link_loads,
    write_link_loads,
)
from meshwright.cli.collective.list import max_bytes_sent
from meshwright.cli.parser import add_common
from meshwright.cli.render.files import write_text
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.policy.collective import ChunkMoves, Collective

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


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the steps, and with the load of each link where a cluster is named."""
    on = read_target(args, needed=bool(args.loads))
    found = build_collective(args, on)
    notes: list[View] = []
    for flag, path in (("--svg", args.svg), ("--loads", args.loads)):
        if path and not path.lower().endswith(".svg"):
            raise InputError([Problem(flag, f"{path} is no .svg file", "end it in .svg")])
    if args.svg:
        picture, left_out = schedule_svg.draw_schedule(found)
        write_text(args.svg, picture)
        missing = f" without {left_out}" if left_out else ""
        notes.append(NoteView(f"wrote {args.svg}{missing}"))
    steps = [_step(step, moves, found) for step, moves in _first(found)]
    data = {**summarize_collective(found), "shown_steps": steps}
    rows = [(step["step"], step["moves"], step["what"]) for step in steps]
    views: list[View] = [
        make_fields(_words(found)),
        make_table("step, moves, what happens", rows, right="step, moves", wide="what happens"),
    ]
    if found.steps > len(steps):
        notes.append(NoteView(f"{found.steps - len(steps)} more steps are not shown"))
    if on is not None:
        loads = compute_link_loads(require_verified(args, found), on, read_size(args))
        views.append(render_link_loads(loads))
        data["links"] = [load._asdict() for load in loads]
        if args.loads:
            write_link_loads(args.loads, found, loads)
            notes.append(NoteView(f"wrote {args.loads}"))
    return CommandResult("collective.show/2", data, (*views, *notes), (str(found.steps),))


def summarize_collective(found: Collective) -> dict[str, object]:
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
        "most_sent_messages": round(max_bytes_sent(found), 6),
    }


def _words(found: Collective) -> dict[str, object]:
    plain = {key.replace("_", " "): value for key, value in summarize_collective(found).items()}
    plain["sent by the busiest rank"] = f"{plain.pop('most sent messages')} × the message"
    return plain


def _first(found: Collective) -> list[tuple[int, ChunkMoves]]:
    kept = []
    for step, moves in found.iterate_steps():
        if step >= _MOST_STEPS:
            break
        kept.append((step, moves))
    return kept


def _step(step: int, moves: ChunkMoves, found: Collective) -> dict[str, object]:
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
    return str(place) if place < found.ranks else found.format_endpoint(place)
