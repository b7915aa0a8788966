"""`mw collective explain`: what NCCL will pick on a cluster, and why."""

import argparse
from typing import get_args

import msgspec

from meshwright.cli.answer import Answer, Note, Text, View, table
from meshwright.cli.collective_source import Target, add_cluster, op_of, target
from meshwright.cli.parser import add_common
from meshwright.errors import InputError, Problem
from meshwright.predict.network import Op, Placement, placement
from meshwright.predict.network.constants import ALGORITHMS, DEFAULT_NCCL
from meshwright.predict.network.explain import explain, explain_size
from meshwright.predict.network.explain_words import sentences, size_sentences, table_rows
from meshwright.spec.names import unknown_name
from meshwright.spec.units import parse_bytes

EXAMPLES = (
    "mw collective explain --cluster h100-superpod --gpus 16",
    "mw collective explain --cluster h100-superpod --gpus 16 --op all_gather --size 1MiB",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--op", metavar="OP", default="all_reduce", help="default: all_reduce")
    parser.add_argument("--size", metavar="BYTES", help="one size, with every cost (default: all)")
    add_nccl(parser)
    add_cluster(parser)
    add_common(parser)


def add_nccl(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which NCCL, and what it may use."""
    group = parser.add_argument_group("NCCL")
    group.add_argument("--nccl", metavar="VERSION", default=DEFAULT_NCCL,
                       help=f"its release (default: {DEFAULT_NCCL})")  # fmt: skip
    group.add_argument("--collnet", action="store_true", help="as NCCL_COLLNET_ENABLE=1 (SHARP)")
    group.add_argument("--only", metavar="NAMES", help="as NCCL_ALGO: algorithms, comma-separated")


def run(args: argparse.Namespace) -> Answer:
    """Answer with the choice for every size, or with all costs of one."""
    on = target(args)
    assert on is not None
    place, op, only = whole(on), nccl_op(args.op), only_of(args)
    if args.size is None:
        found = explain(place, op, nccl=args.nccl, collnet=args.collnet, only=only)
        shown: tuple[View, ...] = (*(Text(line) for line in sentences(found)), *_doubts(place))
        quiet = tuple(
            f"{part.start_bytes}\t{part.algorithm}\t{part.protocol}" for part in found.segments
        )
        return Answer("collective.explain/1", msgspec.to_builtins(found), shown, quiet)
    size = parse_bytes(args.size, "--size")
    costs = explain_size(place, op, size, nccl=args.nccl, collnet=args.collnet, only=only)
    heading, *rows = table_rows(costs)
    numbers = "channels, NCCL's estimate, latency, bytes, predicted"
    named = [name or "remark" for name in heading]
    views: tuple[View, ...] = (
        *(Text(line) for line in size_sentences(costs)),
        table(", ".join(named), rows, right=numbers, wide="remark"),
        *_doubts(place),
    )
    winner = costs.candidates[0] if costs.candidates else None
    brief = () if winner is None else (f"{winner.algorithm}\t{winner.protocol}",)
    return Answer("collective.explain_size/1", msgspec.to_builtins(costs), views, brief)


def _doubts(place: Placement) -> tuple[View, ...]:
    """Return what makes the answer unsure on some machines."""
    notes: list[View] = []
    if not place.links.nccl:
        notes.append(Note("these are no NVIDIA GPUs: NCCL's model stands in for their own library"))
    elif place.inside == "host":
        notes.append(Note("without NVLink, NCCL leaves LL128 out unless NCCL_PROTO names it"))
    if place.units > 1 and place.links.fabric == "efa":
        notes.append(Note("the EFA plugin brings a tuner of its own, which may choose otherwise"))
    return tuple(notes)


def whole(on: Target) -> Placement:
    """Return where the first GPUs of a cluster lie, alone on it."""
    return placement(on.cluster, range(on.gpus), sharers=1)


def nccl_op(text: str) -> Op:
    """Return an operation that NCCL has a cost model for."""
    op = op_of(text)
    known: tuple[Op, ...] = get_args(Op)
    found = next((name for name in known if name == op), None)
    if found is None:
        what = f"NCCL has no {op} of its own"
        raise InputError([Problem("--op", what, f"use {', '.join(known)}")])
    return found


def only_of(args: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the algorithms that NCCL may use; None for all."""
    if args.only is None:
        return None
    # NCCL_ALGO writes NVLSTree and CollnetDirect.
    known = {name.replace("_", ""): name for name in ALGORITHMS}
    words = [word.strip().lower() for word in args.only.split(",") if word.strip()]
    names = tuple(known.get(word.replace("_", ""), word) for word in words)
    strange = [name for name in names if name not in ALGORITHMS]
    if strange:
        raise InputError(unknown_name("algorithm", n, ALGORITHMS, "--only") for n in strange)
    return names
