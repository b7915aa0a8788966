"""Orders of the axes on the fabric that differ in what they cost.

Most of the 120 orders put every group in the same places as another one: an axis of one rank has
no place, and a group that leaves the node leaves it in any order. Orders are told apart first by
the groups that talk inside a pass, then by those that exchange gradients and parameters.
"""

from itertools import permutations
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.block_comm import neighbours, place
from meshwright.predict.network import Placement, strided
from meshwright.predict.network.placement import unit_gpus
from meshwright.predict.plan.question import Question
from meshwright.spec.layout import Layout
from meshwright.spec.layout.kinds import AXES
from meshwright.spec.layout.ranks import group_of, pipelines_agree


class Inside(NamedTuple):
    """Where the groups lie that talk inside a layer."""

    tp: Placement
    cp: Placement
    ring: tuple[tuple[Placement, int], ...]
    """Neighbours along cp."""
    ep: Placement | None
    expert_tp: Placement | None


def inside_of(question: Question, layout: Layout) -> Inside:
    """Return where the groups of a layout lie that talk inside a layer."""
    cluster, experts = question.limited, question.model.experts is not None
    return Inside(
        place(cluster, layout, "tp"),
        place(cluster, layout, "cp"),
        neighbours(cluster, layout, "cp"),
        place(cluster, layout, "ep") if layout.ep > 1 else None,
        place(cluster, layout, "expert_tp") if experts else None,
    )


def places(question: Question, layout: Layout) -> dict[tuple[Inside, object], tuple[str, ...]]:
    """Return the orders worth telling apart for the degrees of a layout.

    Orders of one group put the groups that talk inside a pass in the same places: those of a
    layer, and neighbours along the pipeline.
    """
    cluster, experts = question.limited, question.model.experts is not None
    found: dict[tuple[Inside, object], dict[object, str]] = {}
    for order in orders_of(question, layout):
        ordered = replace(layout, order=order)
        inside = inside_of(question, ordered)
        outside = (_strides(ordered), place(cluster, ordered, "expert_dp") if experts else None)
        group = found.setdefault((inside, neighbours(cluster, ordered, "pp")), {})
        group.setdefault(outside, order)
    return {one: tuple(orders.values()) for one, orders in found.items()}


def orders_of(question: Question, layout: Layout) -> list[str]:
    """Return the allowed orders, axes without a place last in their usual order.

    The usual order of Megatron comes first, so that it stands for those that cost the same. Experts
    and dense layers of a rank have to lie in the same stage.
    """
    experts = question.model.experts is not None
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


def expert_places(question: Question, layout: Layout, *axes: str) -> set[tuple[Placement, ...]]:
    """Return the places that groups of experts along some axes may have together."""
    sizes = {
        "tp": layout.experts_tp, "ep": layout.ep, "dp": layout.expert_dp, "pp": layout.pp, "cp": 1,
    }  # fmt: skip
    found = set()
    for order in question.space.allowed("order") or ():
        stride, strides = 1, dict[str, int]()
        for axis in order.split("-"):
            strides[axis] = stride
            stride *= sizes[axis]
        found.add(tuple([strides[axis] for axis in axes]))
    cluster = question.limited
    return {
        tuple([strided(cluster, 0, sizes[axis], one) for axis, one in zip(axes, some, strict=True)])
        for some in found
    }


def _sound(question: Question, layout: Layout) -> bool:
    experts = question.model.experts is not None
    if experts and not pipelines_agree(layout):
        return False
    if not question.space.must_fit_node:
        return True
    axes = ("tp", "cp", "expert_tp", "ep") if experts else ("tp", "cp")
    return all(_stays_inside(question, layout, axis) for axis in axes)


def _stays_inside(question: Question, layout: Layout, axis: str) -> bool:
    """Tell whether every group along an axis lies in one unit: blocks of them divide it evenly."""
    ranks, unit = group_of(layout, 0, axis), unit_gpus(question.cluster)
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
