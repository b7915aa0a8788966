"""Orders of the axes on the fabric that differ in what they cost.

Most of the 120 orders put every group in the same places as another one: an axis of one rank has
no place, and a group that leaves the node leaves it in any order. Orders are told apart first by
the groups that talk inside a pass, then by those that exchange gradients and parameters.
"""

from itertools import permutations
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.network import Placement, build_strided_placement
from meshwright.predict.network.placement import count_domain_gpus
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.step.block_comm import build_group_placement, list_neighbor_placements
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import AXES
from meshwright.spec.layout.ranks import get_process_group, has_matching_expert_stages


class GroupPlacements(NamedTuple):
    """Where the groups lie that talk inside a layer."""

    tp: Placement
    cp: Placement
    cp_neighbors: tuple[tuple[Placement, int], ...]
    """Neighbours along cp."""
    ep: Placement | None
    expert_tp: Placement | None


def find_group_placements(question: PlanQuestion, layout: Layout) -> GroupPlacements:
    """Return where the groups of a layout lie that talk inside a layer."""
    cluster, experts = question.usable_cluster, question.model.moe is not None
    return GroupPlacements(
        build_group_placement(cluster, layout, "tp"),
        build_group_placement(cluster, layout, "cp"),
        list_neighbor_placements(cluster, layout, "cp"),
        build_group_placement(cluster, layout, "ep") if layout.ep > 1 else None,
        build_group_placement(cluster, layout, "expert_tp") if experts else None,
    )


def list_distinct_orders(
    question: PlanQuestion, layout: Layout
) -> dict[tuple[GroupPlacements, object], tuple[str, ...]]:
    """Return the orders worth telling apart for the degrees of a layout.

    Orders of one group put the groups that talk inside a pass in the same places: those of a
    layer, and neighbours along the pipeline.
    """
    cluster, experts = question.usable_cluster, question.model.moe is not None
    found: dict[tuple[GroupPlacements, object], dict[object, str]] = {}
    for order in list_allowed_orders(question, layout):
        ordered = replace(layout, order=order)
        inside = find_group_placements(question, ordered)
        outside = (
            _strides(ordered),
            build_group_placement(cluster, ordered, "expert_dp") if experts else None,
        )
        group = found.setdefault((inside, list_neighbor_placements(cluster, ordered, "pp")), {})
        group.setdefault(outside, order)
    return {one: tuple(orders.values()) for one, orders in found.items()}


def list_allowed_orders(question: PlanQuestion, layout: Layout) -> list[str]:
    """Return the allowed orders, axes without a place last in their usual order.

    The usual order of Megatron comes first, so that it stands for those that cost the same. Experts
    and dense layers of a rank have to lie in the same stage.
    """
    experts = question.model.moe is not None
    orders = question.space.fixed.get("order")
    if orders is None:
        # Expert groups use the places of tp and dp even where the dense part has none.
        active = [
            axis for axis in AXES if getattr(layout, axis) > 1 or (experts and axis in ("tp", "dp"))
        ]
        idle = [axis for axis in AXES if axis not in active]
        orders = tuple("-".join((*some, *idle)) for some in permutations(active))
    every = (replace(layout, order=order) for order in orders)
    return [one.order for one in every if _sound(question, one)]


def list_expert_placements(
    question: PlanQuestion, layout: Layout, *axes: str
) -> set[tuple[Placement, ...]]:
    """Return the places that groups of experts along some axes may have together."""
    sizes = {
        "tp": layout.effective_expert_tp,
        "ep": layout.ep,
        "dp": layout.expert_dp,
        "pp": layout.pp,
        "cp": 1,
    }
    found = set()
    for order in question.space.get_allowed("order") or ():
        stride, strides = 1, dict[str, int]()
        for axis in order.split("-"):
            strides[axis] = stride
            stride *= sizes[axis]
        found.add(tuple([strides[axis] for axis in axes]))
    cluster = question.usable_cluster
    return {
        tuple(
            [
                build_strided_placement(cluster, 0, sizes[axis], one)
                for axis, one in zip(axes, some, strict=True)
            ]
        )
        for some in found
    }


def _sound(question: PlanQuestion, layout: Layout) -> bool:
    experts = question.model.moe is not None
    if experts and not has_matching_expert_stages(layout):
        return False
    if not question.space.fit_scale_up_domain:
        return True
    axes = ("tp", "cp", "expert_tp", "ep") if experts else ("tp", "cp")
    return all(_stays_inside(question, layout, axis) for axis in axes)


def _stays_inside(question: PlanQuestion, layout: Layout, axis: str) -> bool:
    """Tell whether every group along an axis lies in one unit: blocks of them divide it evenly."""
    ranks, unit = get_process_group(layout, 0, axis), count_domain_gpus(question.cluster)
    if len(ranks) == 1 or question.gpus <= unit:
        return True
    return unit % ((ranks[1] - ranks[0]) * len(ranks)) == 0


def _strides(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Return the strides of the axes that share gradients, which decide every group of them."""
    stride, found = 1, []
    for axis in layout.order.split("-"):
        if axis == "ep":
            continue
        if axis in ("cp", "dp") and getattr(layout, axis) > 1:
            found.append((axis, stride))
        stride *= getattr(layout, axis)
    return tuple(found)
