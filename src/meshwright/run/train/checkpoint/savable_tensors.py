"""What can be saved and loaded, each kind of tensor in terms of the whole it is part of."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.sharding.sharded_tensor import BlockScales, ShardChunk, ShardedTensor
from meshwright.run.train.checkpoint.safetensors_layout import get_dtype_name

SavableTensor = torch.Tensor | ShardedTensor | BlockScales
"""A whole tensor, a `DTensor`, a part of a whole, or scales of the blocks of one."""
SavableTensors = Mapping[str, SavableTensor]

KEY_SEPARATOR = "@"
"""Stands between the name of some `BlockScales` and their mark."""
ORDER_PREFIX = f"order{KEY_SEPARATOR}"
"""Before a mark, the name of a tensor with the boxes that the mark stands for."""


def add_scale_layout_tensors(tensors: SavableTensors) -> dict[str, ShardedTensor]:
    """Return what is written of tensors: themselves, and which elements share their scales."""
    marked = {
        f"{ORDER_PREFIX}{each.layout_key}": each
        for each in tensors.values()
        if isinstance(each, BlockScales) and each.layout_key
    }
    orders = {
        name: ShardedTensor.unsharded(
            torch.tensor(each.global_boxes, dtype=torch.int64).view(
                len(each.global_boxes), 2, len(each.global_shape)
            )
        )
        for name, each in marked.items()
    }
    return convert_to_sharded_tensors(tensors) | orders


def convert_to_sharded_tensors(tensors: SavableTensors) -> dict[str, ShardedTensor]:
    """Return every tensor as part of a whole, under the name it is saved by."""
    found = {}
    for name, given in tensors.items():
        match given:
            case ShardedTensor():
                found[name] = given
            case BlockScales():
                found[make_scale_key(name, given)] = ShardedTensor.unsharded(given.tensor)
            case DTensor():
                found[name] = _of_distributed(given)
            case _:
                found[name] = ShardedTensor.unsharded(given)
    return found


def make_scale_key(name: str, scales: BlockScales) -> str:
    """Return the name that scales are saved by."""
    return f"{name}{KEY_SEPARATOR}{scales.layout_key}" if scales.layout_key else name


def _of_distributed(tensor: DTensor) -> ShardedTensor:
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = tensor.to_local().detach()
    assert len(chunks) == 1, "torch gives one chunk to a rank"
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    everything = tuple(slice(0, size) for size in sizes)
    parts = (ShardChunk(offsets, sizes, everything),) if local.numel() else ()
    return ShardedTensor(local, tuple(tensor.shape), parts)


def find_unsavable_tensors(tensors: Mapping[str, object]) -> list[Problem]:
    """Say which of them cannot be saved."""
    problems = []
    for name, given in tensors.items():
        tensor = given.tensor if isinstance(given, ShardedTensor | BlockScales) else given
        if not isinstance(tensor, torch.Tensor):
            what, fix = f"a {type(tensor).__name__} is no tensor", "put it into `extra`"
            problems.append(Problem(name, what, fix))
        elif tensor.is_meta:
            problems.append(Problem(name, "it is on the meta device", "materialize it"))
        else:
            try:
                get_dtype_name(tensor.dtype, name)
            except InputError as error:
                problems += error.problems
    return problems
