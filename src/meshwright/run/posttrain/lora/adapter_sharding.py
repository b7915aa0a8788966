"""How ranks that share a model share an adapter: as they share the layers it stands beside.

    rows of W are shared       A whole, each rank with a part of its gradient; B and m by rows
    columns of W are shared    A by columns; B and m whole, each rank with a part of their gradient
    W is whole                 all are, with gradients as W's would be

So what a layer adds is a part of the same sum, or the same rows, as its own product, and nothing
more is exchanged but for the lengths of rows whose columns are shared (DoRA). Where ranks hold the
same keys and values, they hold the same rows of B.

Shapes: K inputs, M outputs, R rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.parallel.sharded_model import ShardedModel

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Parameters of a pair, by PEFT's names."""


class ModuleRows(NamedTuple):
    """What a rank holds of the rows of one module of theirs."""

    row_indices: Tensor
    """Their numbers in the module, from the first on."""
    replicated_rows: IndexRange | None
    """Those of them, by place, that neighbours hold too."""


def find_local_rows(source: Tensor, count: int, twin_rows: IndexRange | None) -> ModuleRows:
    """Return what a layer of a rank has of a module's `count` rows.

    `source` has the module's row for each row of the layer, or `count`; `twin_rows` are those of
    the layer that neighbours hold too.
    """
    mine = source < count
    theirs, order = torch.sort(source[mine])
    if twin_rows is None:
        return ModuleRows(theirs, None)
    here = torch.arange(len(source))
    shared = ((here >= twin_rows.start) & (here < twin_rows.stop))[mine][order].nonzero().flatten()
    if not len(shared):
        return ModuleRows(theirs, None)
    found = IndexRange(int(shared[0]), int(shared[-1]) + 1)
    if found.size != len(shared):
        what = "ranks hold the same keys, whose rows are not contiguous in a module of this family"
        fix = "use no more tensor-parallel ranks than key and value heads"
        raise InputError([Problem("layout.tp", what, fix)])
    return ModuleRows(theirs, found)


def build_pair_shards(
    weight: ShardSpec, rows: ModuleRows, count: int, rank: int
) -> dict[str, ShardSpec]:
    """Return how a rank holds a pair beside a layer whose weight it holds so.

    The module has `count` rows, of which the rank has `rows`.
    """
    inputs = weight.global_shape[1]
    a, b = ShardSpec.unsharded((rank, inputs)), ShardSpec.unsharded((count, rank))
    magnitude = ShardSpec.unsharded((count,))
    if weight.shape[0] != weight.global_shape[0]:
        a = replace(a, grad_sum_group="tp")
        if len(rows.row_indices) == count:  # every rank has the same rows, each for its own queries
            b, magnitude = replace(b, grad_sum_group="tp"), replace(magnitude, grad_sum_group="tp")
        else:
            twins = (
                {}
                if rows.replicated_rows is None
                else {"kv_replicas": weight.kv_replicas, "kv_replica_rows": rows.replicated_rows}
            )
            ranges = _runs(rows.row_indices)
            b = replace(b, ranges=(ranges, *b.ranges[1:]), **twins)  # type: ignore[arg-type]
            magnitude = replace(magnitude, ranges=(ranges,), **twins)  # type: ignore[arg-type]
    elif weight.shape[1] != inputs:
        a = replace(a, ranges=(a.ranges[0], weight.ranges[1]))
        b, magnitude = replace(b, grad_sum_group="tp"), replace(magnitude, grad_sum_group="tp")
    else:
        a, b, magnitude = (
            replace(one, grad_sum_group=weight.grad_sum_group) for one in (a, b, magnitude)
        )
    found = {A: a, B: b, MAGNITUDE: magnitude}
    return {
        name: replace(one, shared_stage_group=weight.shared_stage_group)
        for name, one in found.items()
    }


def _runs(numbers: Tensor) -> tuple[IndexRange, ...]:
    """Return sorted numbers as runs without gaps."""
    found: list[IndexRange] = []
    for number in numbers.tolist():
        if found and found[-1].stop == number:
            found[-1] = IndexRange(found[-1].start, number + 1)
        else:
            found.append(IndexRange(number, number + 1))
    return tuple(found) or (IndexRange(0, 0),)


@torch.no_grad()
def gather_adapter(
    sharded_model: ShardedModel,
    mine: Mapping[str, nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    keep: bool,
) -> dict[str, Tensor]:
    """Return whole parameters of which ranks hold parts, on the host; all ranks take part.

    `shapes` are those of all, in one order on all ranks; who does not `keep` them returns nothing.
    """
    mesh, found = sharded_model.mesh, {}
    for name, shape in shapes.items():
        # Less than any number: the largest is what a rank has, bit by bit, whoever else has it.
        whole = torch.full(shape, -torch.inf, device=mesh.device)
        if name in mine:
            for box in sharded_model.shard_specs[name].list_boxes():
                whole[_cut(box.global_ranges)] = mine[name][_cut(box.local_ranges)]
        whole = mesh.world.all_reduce(whole, "max")
        assert not torch.isneginf(whole).any(), f"no rank holds all of {name}"
        if keep:
            found[name] = whole.cpu()
    return found


def _cut(ranges: tuple[IndexRange, ...]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in ranges)
