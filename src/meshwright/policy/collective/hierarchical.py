"""Hierarchies: reduce-scatter inside nodes, exchange between nodes rail by rail, all-gather inside.

GPU l of every node exchanges with GPU l of the others only, so traffic between nodes stays on its
rail and shrinks by the width of a node. With pods, the same happens once more between them.
"""

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective, Op
from meshwright.policy.collective.direct import direct_level
from meshwright.policy.collective.halving import halving_level
from meshwright.policy.collective.levels import Level, Stage, over_levels
from meshwright.policy.collective.shape import Shape


def two_level(op: Op, shape: Shape) -> Collective:
    """Direct inside nodes, a ring between them on every rail."""
    width = shape.width
    levels = [direct_level(width), ring_level(shape.ranks // width)]
    return over_levels("two_level", op, shape, levels)


def two_level_halving(op: Op, shape: Shape) -> Collective:
    """Direct inside nodes, halving and doubling between them on every rail."""
    width = shape.width
    levels = [direct_level(width), halving_level(shape.ranks // width)]
    return over_levels("two_level_halving", op, shape, levels)


def three_level(op: Op, shape: Shape) -> Collective:
    """Direct inside nodes, a ring between the nodes of a pod, a ring between pods."""
    width, per_pod = shape.width, shape.nodes_per_pod or 1
    nodes = shape.ranks // width
    if nodes % per_pod:
        what = f"{nodes} nodes do not fill pods of {per_pod}"
        raise InputError([Problem("nodes_per_pod", what, f"use a divisor of {nodes}")])
    levels = [direct_level(width), ring_level(per_pod), ring_level(nodes // per_pod)]
    return over_levels("three_level", op, shape, levels)


def ring_level(width: int) -> Level:
    """Return the level at which ranks pass shares around a ring."""
    return Level(width, _scatter, _gather)


def _scatter(stage: Stage) -> None:
    with stage.sweep(stage.width - 1, shares=-1):
        for rank in stage.ranks:
            own, width = stage.digit(rank), stage.width
            stage.add(rank, stage.member(rank, (own + 1) % width), (own - 1) % width)


def _gather(stage: Stage) -> None:
    with stage.sweep(stage.width - 1, shares=-1):
        for rank in stage.ranks:
            own = stage.digit(rank)
            stage.copy(rank, stage.member(rank, (own + 1) % stage.width), own)
