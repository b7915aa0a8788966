"""`mw collective explain`: what NCCL will pick on a cluster, and why."""

import argparse
from typing import get_args

import msgspec

from meshwright.cli.collective.flags import CollectiveTarget, add_cluster, parse_op, read_target
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_table
from meshwright.errors import InputError, Problem
from meshwright.predict.network import NcclOp, Placement, build_placement
from meshwright.predict.network.explain.explanation import explain_choice, explain_size
from meshwright.predict.network.explain.explanation_text import (
    format_explanation,
    format_size_explanation,
    format_table,
)
from meshwright.predict.network.nccl_constants import ALGORITHMS, DEFAULT_NCCL
from meshwright.spec.name_suggestions import build_unknown_name_problem
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


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the choice for every size, or with all costs of one."""
    on = read_target(args)
    assert on is not None
    place, op, only = make_full_placement(on), parse_nccl_op(args.op), read_allowed_algorithms(args)
    if args.size is None:
        found = explain_choice(place, op, nccl=args.nccl, collnet=args.collnet, only=only)
        shown: tuple[View, ...] = (
            *(TextView(line) for line in format_explanation(found)),
            *_doubts(place),
        )
        quiet = tuple(
            f"{part.start_bytes}\t{part.algorithm}\t{part.protocol}" for part in found.segments
        )
        return CommandResult("collective.explain/2", msgspec.to_builtins(found), shown, quiet)
    size = parse_bytes(args.size, "--size")
    costs = explain_size(place, op, size, nccl=args.nccl, collnet=args.collnet, only=only)
    heading, *rows = format_table(costs)
    numbers = "channels, NCCL's estimate, latency, bytes, predicted"
    named = [name or "remark" for name in heading]
    views: tuple[View, ...] = (
        *(TextView(line) for line in format_size_explanation(costs)),
        make_table(", ".join(named), rows, right=numbers, wide="remark"),
        *_doubts(place),
    )
    winner = costs.candidates[0] if costs.candidates else None
    brief = () if winner is None else (f"{winner.algorithm}\t{winner.protocol}",)
    return CommandResult("collective.explain_size/2", msgspec.to_builtins(costs), views, brief)


def _doubts(place: Placement) -> tuple[View, ...]:
    """Return what makes the answer unsure on some machines."""
    notes: list[View] = []
    if not place.links.uses_nccl:
        notes.append(
            NoteView("these are no NVIDIA GPUs: NCCL's model stands in for their own library")
        )
    elif place.intra_link == "host":
        notes.append(NoteView("without NVLink, NCCL leaves LL128 out unless NCCL_PROTO names it"))
    if place.domains > 1 and place.links.fabric == "efa":
        notes.append(
            NoteView("the EFA plugin brings a tuner of its own, which may choose otherwise")
        )
    return tuple(notes)


def make_full_placement(on: CollectiveTarget) -> Placement:
    """Return where the first GPUs of a cluster lie, alone on it."""
    return build_placement(on.cluster, range(on.gpus), sharers=1)


def parse_nccl_op(text: str) -> NcclOp:
    """Return an operation that NCCL has a cost model for."""
    op = parse_op(text)
    known: tuple[NcclOp, ...] = get_args(NcclOp)
    found = next((name for name in known if name == op), None)
    if found is None:
        what = f"NCCL has no {op} of its own"
        raise InputError([Problem("--op", what, f"use {', '.join(known)}")])
    return found


def read_allowed_algorithms(args: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the algorithms that NCCL may use; None for all."""
    if args.only is None:
        return None
    # NCCL_ALGO writes NVLSTree and CollnetDirect.
    known = {name.replace("_", ""): name for name in ALGORITHMS}
    words = [word.strip().lower() for word in args.only.split(",") if word.strip()]
    names = tuple(known.get(word.replace("_", ""), word) for word in words)
    strange = [name for name in names if name not in ALGORITHMS]
    if strange:
        raise InputError(
            build_unknown_name_problem("algorithm", n, ALGORITHMS, "--only") for n in strange
        )
    return names
