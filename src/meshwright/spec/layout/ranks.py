"""Which rank sits where: rank ↔ coordinate maps, process groups and mesh shapes of a layout.

A rank is a number in mixed radix whose digits are its coordinates, the fastest axis of
`Layout.order` first. The dense part of a model uses the digits tp, cp, dp, pp; its experts read the
same ranks with the digits expert_tp, ep, expert_dp, pp. Both equal Megatron-Core's `RankGenerator`,
and the meshes equal torch's `init_device_mesh`. Nothing here talks to a process group.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import build_unknown_name_problem

if TYPE_CHECKING:
    from meshwright.spec.layout.layout import Layout

ProcessGroupRanks = tuple[int, ...]
"""Ranks that communicate with each other, in the order of their index inside the group."""


class RankCoordinate(NamedTuple):
    """Where a rank stands in the dense part of the model."""

    tp: int
    cp: int
    dp: int
    pp: int


class ExpertRankCoordinate(NamedTuple):
    """Where a rank stands in the routed experts."""

    expert_tp: int
    ep: int
    expert_dp: int
    pp: int


class MeshShape(NamedTuple):
    """What `init_device_mesh` takes: dimensions from the outermost (slowest) to the innermost."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]


class _Axis(NamedTuple):
    name: str
    size: int
    stride: int


# An order names each axis once; these are the words for it in either part of the model.
_DENSE = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
_EXPERT = {"tp": "expert_tp", "ep": "ep", "dp": "expert_dp", "pp": "pp"}

NAMED_GROUPS = ("embedding", "position_embedding", "replicate", "shard")
"""Groups that are not the product of axes; `list_process_groups` explains them."""


@lru_cache(maxsize=1024)
def _grid(order: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[_Axis, ...]:
    words = _DENSE if "tp" in names else _EXPERT
    size_of = dict(zip(names, sizes, strict=True))
    axes, stride = [], 1
    for letter in order.split("-"):
        if letter in words:
            name = words[letter]
            axes.append(_Axis(name, size_of[name], stride))
            stride *= size_of[name]
    return tuple(axes)


def _dense(layout: "Layout") -> tuple[_Axis, ...]:
    """The dense axes, fastest first."""
    sizes = (layout.tp, layout.cp, layout.dp, layout.pp)
    return _grid(layout.order, RankCoordinate._fields, sizes)


def _experts(layout: "Layout") -> tuple[_Axis, ...]:
    """The expert axes, fastest first."""
    sizes = (layout.effective_expert_tp, layout.ep, layout.expert_dp, layout.pp)
    if sizes[0] * sizes[1] * sizes[2] * sizes[3] != layout.gpus:
        what = (
            f"{layout.effective_expert_tp} does not divide tp × cp × dp = "
            f"{layout.gpus // layout.pp}"
        )
        raise InputError([Problem("layout.expert_tp", what, "leave expert_tp out")])
    return _grid(layout.order, ExpertRankCoordinate._fields, sizes)


def get_coordinate(layout: "Layout", rank: int) -> RankCoordinate:
    """Return where `rank` stands in the dense part of the model."""
    _check_rank(layout, rank)
    return RankCoordinate(**{name: rank // stride % size for name, size, stride in _dense(layout)})


def get_expert_coordinate(layout: "Layout", rank: int) -> ExpertRankCoordinate:
    """Return where `rank` stands in the routed experts."""
    _check_rank(layout, rank)
    return ExpertRankCoordinate(
        **{name: rank // stride % size for name, size, stride in _experts(layout)}
    )


def get_rank(layout: "Layout", place: RankCoordinate | ExpertRankCoordinate) -> int:
    """Return the rank that stands at a coordinate of either part of the model."""
    rank, problems = 0, []
    for name, size, stride in (
        _dense(layout) if isinstance(place, RankCoordinate) else _experts(layout)
    ):
        index: int = getattr(place, name)
        if not 0 <= index < size:
            problems.append(Problem(name, f"{index} is not from 0 to {size - 1}"))
        rank += index * stride
    if problems:
        raise InputError(problems)
    return rank


def list_process_groups(layout: "Layout", axes: str) -> tuple[ProcessGroupRanks, ...]:
    """Return every group of ranks that differ only in `axes`, in Megatron's order.

    `axes` joins the words of one part of the model with hyphens (`tp`, `dp-cp`, `tp-pp`; `ep`,
    `expert_tp-ep-pp`), in any order, or is one of four names:

    - `embedding`: the first and last stage of each pipeline, which share tied embeddings;
    - `position_embedding`: the first stage of each pipeline;
    - `shard`: data-parallel ranks (context-parallel ones included) that share one copy of the
      states which `zero` shards;
    - `replicate`: ranks that hold the same shard in different copies.
    """
    if axes == "embedding":
        return tuple(_ends(group) for group in list_process_groups(layout, "pp"))
    if axes == "position_embedding":
        return tuple(group[:1] for group in list_process_groups(layout, "pp"))
    if axes in ("shard", "replicate"):
        return tuple(
            part
            for group in list_process_groups(layout, "dp-cp")
            for part in _split(layout, group, axes)
        )
    inside, outside = _divide(layout, axes)
    steps = _offsets(inside)
    return tuple(tuple([base + step for step in steps]) for base in _offsets(outside))


def get_process_group(layout: "Layout", rank: int, axes: str) -> ProcessGroupRanks:
    """Return the group of `list_process_groups` that holds `rank`; empty where none does."""
    _check_rank(layout, rank)
    if axes in ("embedding", "position_embedding"):
        line = get_process_group(layout, rank, "pp")
        group = _ends(line) if axes == "embedding" else line[:1]
        return group if rank in group else ()
    if axes in ("shard", "replicate"):
        parts = _split(layout, get_process_group(layout, rank, "dp-cp"), axes)
        return next(part for part in parts if rank in part)
    inside, _ = _divide(layout, axes)
    base = rank - sum(rank // axis.stride % axis.size * axis.stride for axis in inside)
    return tuple([base + step for step in _offsets(inside)])


def has_matching_expert_stages(layout: "Layout") -> bool:
    """Tell whether the experts of a rank lie in the same pipeline stage as its dense layers.

    They always do when pp is the last axis. Megatron-Core refuses layouts where they do not.
    """
    strides = {axis.stride for axis in (*_dense(layout), *_experts(layout)) if axis.name == "pp"}
    return layout.pp == 1 or len(strides) == 1


def get_mesh_shape(layout: "Layout") -> MeshShape:
    """Return the device mesh of the dense part: pp, dp, cp, tp for the default order.

    With `shard` set, dp becomes `dp_replicate` × `dp_shard` (hybrid sharding). cp is split the same
    way only where a copy of the states covers a part of the context-parallel ranks.
    """
    if layout.shard is None:
        return _mesh((axis.name, axis.size) for axis in _dense(layout))
    dims: list[tuple[str, int]] = []
    left = layout.shard
    for name, size, _ in _dense(layout):
        if name not in ("cp", "dp"):
            dims.append((name, size))
            continue
        part = size if left % size == 0 else left
        if size % part:
            what = f"{layout.shard} cuts the {size} ranks of {name} into uneven parts"
            fix = f"use a multiple or a divisor of {layout.shard // left * size}"
            raise InputError([Problem("layout.shard", what, fix)])
        left //= part
        if name == "dp" or part < size:
            dims += [(f"{name}_shard", part), (f"{name}_replicate", size // part)]
        else:
            dims.append((name, size))
    return _mesh(dims)


def get_expert_mesh_shape(layout: "Layout") -> MeshShape:
    """Return the device mesh of the experts: pp, expert_dp, ep, expert_tp for the default order."""
    return _mesh((axis.name, axis.size) for axis in _experts(layout))


def _mesh(dims: Iterable[tuple[str, int]]) -> MeshShape:
    """Turn dimensions given from the fastest to the slowest into a mesh."""
    names, sizes = zip(*reversed(list(dims)), strict=True)
    return MeshShape(names, sizes)


def _divide(layout: "Layout", axes: str) -> tuple[list[_Axis], list[_Axis]]:
    """Return the axes that `axes` names and the others of the same part, both fastest first."""
    wanted = axes.split("-")
    known = {*RankCoordinate._fields, *ExpertRankCoordinate._fields}
    problems = [
        build_unknown_name_problem("axis", name, known | set(NAMED_GROUPS), "axes")
        for name in wanted
        if name not in known
    ]
    dense = [name for name in wanted if name in RankCoordinate._fields and name != "pp"]
    expert = [name for name in wanted if name in ExpertRankCoordinate._fields and name != "pp"]
    if dense and expert:
        what = f"{axes!r} mixes axes of the dense part and of the experts"
        fix = (
            f"use either {', '.join(RankCoordinate._fields)} or "
            f"{', '.join(ExpertRankCoordinate._fields)}"
        )
        problems.append(Problem("axes", what, fix))
    if problems:
        raise InputError(problems)
    grid = _experts(layout) if expert else _dense(layout)
    inside = [axis for axis in grid if axis.name in wanted]
    return inside, [axis for axis in grid if axis.name not in wanted]


def _offsets(axes: Sequence[_Axis]) -> list[int]:
    """List the sum of `index × stride` over all indices of the axes, the first axis fastest."""
    offsets = [0]
    for _, size, stride in axes:
        offsets = [index * stride + low for index in range(size) for low in offsets]
    return offsets


def _ends(line: ProcessGroupRanks) -> ProcessGroupRanks:
    return line if len(line) == 1 else (line[0], line[-1])


def _split(layout: "Layout", group: ProcessGroupRanks, axes: str) -> list[ProcessGroupRanks]:
    """Cut one dp-cp group into its shard groups, or into the replicate groups across them."""
    width = layout.shard_degree
    if axes == "shard":
        return [group[start : start + width] for start in range(0, len(group), width)]
    return [group[start::width] for start in range(width)]


def _check_rank(layout: "Layout", rank: int) -> None:
    if type(rank) is not int or not 0 <= rank < layout.gpus:
        what = f"{rank!r} is not a rank of this layout"
        raise InputError([Problem("rank", what, f"use 0 to {layout.gpus - 1}")])
