"""The time of a collective: what callers ask for.

`predict_collective` answers with everything known about a call, `collective_s` with seconds alone,
for planners that ask a hundred thousand times. Sizes follow nccl-tests: the larger of what one rank
sends and what it receives, in bytes.
"""

from functools import lru_cache
from typing import get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.bus_bandwidth import bus_factor
from meshwright.predict.network.cost_curve import CollectiveCurve, build_curve, count_thread_blocks
from meshwright.predict.network.nccl_constants import ALGORITHMS, DEFAULT_NCCL
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.placement import Placement
from meshwright.spec.name_suggestions import build_unknown_name_problem

OPS: tuple[str, ...] = get_args(NcclOp)


class CollectiveCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one call costs."""

    seconds: float
    algorithm: str
    """ring, tree, nvls, nvls_tree, collnet_direct, collnet_chain, pat; pairwise (all-to-all), p2p,
    or none for a group of one."""
    protocol: str
    """ll, ll128, simple; empty where there is no choice."""
    channels: int
    """Thread blocks of the kernel: multiprocessors that compute does not have meanwhile."""
    busbw_bytes_per_s: float
    """Bus bandwidth as nccl-tests counts it."""
    bound_s: float
    """The least time the wires allow."""


def predict_collective(
    place: Placement,
    op: NcclOp,
    nbytes: float,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> CollectiveCost:
    """Return what a collective of `nbytes` costs on a group.

    `collnet` enables reductions in the fabric's switches (SHARP), as NCCL_COLLNET_ENABLE does;
    `only` restricts the algorithms, as NCCL_ALGO does.
    """
    _check(op, nbytes, only)
    if place.ranks == 1:
        return CollectiveCost(
            seconds=0.0, algorithm="none", protocol="", channels=0, busbw_bytes_per_s=0.0, bound_s=0
        )
    line = build_curve(place, op, nccl, collnet, only)
    piece = line.find_segment(nbytes)
    seconds = line.predict_s(nbytes)
    name = "pairwise" if op == "all_to_all" else "p2p"
    return CollectiveCost(
        seconds=seconds,
        algorithm=name if piece.entry is None else piece.entry.algorithm,
        protocol="" if piece.entry is None else piece.entry.protocol,
        channels=count_thread_blocks(piece, place, nbytes),
        busbw_bytes_per_s=nbytes * bus_factor(op, place.ranks) / seconds,
        bound_s=nbytes * line.bound_s_per_byte,
    )


def collective_s(place: Placement, op: NcclOp, nbytes: float, nccl: str = DEFAULT_NCCL) -> float:
    """Return the seconds that a collective of `nbytes` takes on a group."""
    if place.ranks == 1:
        return 0.0
    return _line(place, op, nccl).predict_s(nbytes)


def min_s_per_byte(place: Placement, op: NcclOp, nccl: str = DEFAULT_NCCL) -> float:
    """Return the least that a byte of a collective takes on a group, in messages of any size."""
    if place.ranks == 1:
        return 0.0
    line = _line(place, op, nccl)
    return max(line.bound_s_per_byte, min(piece.cost.s_per_byte for piece in line.segments))


@lru_cache(maxsize=16384)
def _line(place: Placement, op: NcclOp, nccl: str) -> CollectiveCurve:
    _check(op, 0.0, None)
    return build_curve(place, op, nccl)


def compute_share(channels: int, multiprocessors: int) -> float:
    """Return the part of a device that compute keeps while `channels` blocks communicate."""
    return max(0.0, 1 - channels / multiprocessors)


def _check(op: str, nbytes: float, only: tuple[str, ...] | None) -> None:
    problems = []
    if op not in OPS:
        problems.append(build_unknown_name_problem("collective", op, OPS, "op"))
    if not 0 <= nbytes < float("inf"):
        problems.append(Problem("nbytes", f"{nbytes!r} is not a size", "use 0 or more bytes"))
    strange = [name for name in only or () if name not in ALGORITHMS]
    problems += [
        build_unknown_name_problem("algorithm", name, ALGORITHMS, "only") for name in strange
    ]
    if only is not None and "ring" not in only and op in ("broadcast", "reduce"):
        problems.append(Problem("only", f"{op} runs on rings alone", "add ring"))
    if problems:
        raise InputError(problems)
