"""Hierarchies: reduce-scatter inside nodes, exchange between nodes rail by rail, all-gather inside.

GPU l of every node exchanges with GPU l of the others only, so traffic between nodes stays on its
rail and shrinks by the width of a node. With pods, the same happens once more between them.
"""

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.algorithms.direct import build_direct_level
from meshwright.policy.collective.algorithms.hierarchy_levels import (
    HierarchyLevel,
    LevelStage,
    build_hierarchical,
)
from meshwright.policy.collective.algorithms.recursive_halving import build_halving_level
from meshwright.policy.collective.collective import Collective, CollectiveOp


def build_two_level(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Direct inside nodes, a ring between them on every rail."""
    width = shape.ranks_per_node
    levels = [build_direct_level(width), build_ring_level(shape.ranks // width)]
    return build_hierarchical("two_level", op, shape, levels)


def build_two_level_halving(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Direct inside nodes, halving and doubling between them on every rail."""
    width = shape.ranks_per_node
    levels = [build_direct_level(width), build_halving_level(shape.ranks // width)]
    return build_hierarchical("two_level_halving", op, shape, levels)


def build_three_level(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Direct inside nodes, a ring between the nodes of a pod, a ring between pods."""
    width, per_pod = shape.ranks_per_node, shape.nodes_per_pod or 1
    nodes = shape.ranks // width
    if nodes % per_pod:
        what = f"{nodes} nodes do not fill pods of {per_pod}"
        raise InputError([Problem("nodes_per_pod", what, f"use a divisor of {nodes}")])
    levels = [
        build_direct_level(width),
        build_ring_level(per_pod),
        build_ring_level(nodes // per_pod),
    ]
    return build_hierarchical("three_level", op, shape, levels)


def build_ring_level(width: int) -> HierarchyLevel:
    """Return the level at which ranks pass shares around a ring."""
    return HierarchyLevel(width, _scatter, _gather)


def _scatter(stage: LevelStage) -> None:
    with stage.sweep(stage.group_size - 1, shares=-1):
        for rank in stage.ranks:
            own, width = stage.get_index_in_group(rank), stage.group_size
            stage.add(rank, stage.get_member(rank, (own + 1) % width), (own - 1) % width)


def _gather(stage: LevelStage) -> None:
    with stage.sweep(stage.group_size - 1, shares=-1):
        for rank in stage.ranks:
            own = stage.get_index_in_group(rank)
            stage.copy(rank, stage.get_member(rank, (own + 1) % stage.group_size), own)
