"""What can be saved and loaded, each kind of tensor in terms of the whole it is part of."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.placed import BlockScales, Part, Placed
from meshwright.run.train.checkpoint.image import dtype_name

Given = torch.Tensor | Placed | BlockScales
"""A whole tensor, a `DTensor`, a part of a whole, or scales of the blocks of one."""
Tensors = Mapping[str, Given]

MARK = "@"
"""Stands between the name of some `BlockScales` and their mark."""
ORDER = f"order{MARK}"
"""Before a mark, the name of a tensor with the boxes that the mark stands for."""


def to_save(tensors: Tensors) -> dict[str, Placed]:
    """Return what is written of tensors: themselves, and which elements share their scales."""
    marked = {
        f"{ORDER}{each.mark}": each
        for each in tensors.values()
        if isinstance(each, BlockScales) and each.mark
    }
    orders = {
        name: Placed.all_of(
            torch.tensor(each.runs, dtype=torch.int64).view(len(each.runs), 2, len(each.whole))
        )
        for name, each in marked.items()
    }
    return placed_all(tensors) | orders


def placed_all(tensors: Tensors) -> dict[str, Placed]:
    """Return every tensor as part of a whole, under the name it is saved by."""
    found = {}
    for name, given in tensors.items():
        match given:
            case Placed():
                found[name] = given
            case BlockScales():
                found[marked(name, given)] = Placed.all_of(given.tensor)
            case DTensor():
                found[name] = _of_distributed(given)
            case _:
                found[name] = Placed.all_of(given)
    return found


def marked(name: str, scales: BlockScales) -> str:
    """Return the name that scales are saved by."""
    return f"{name}{MARK}{scales.mark}" if scales.mark else name


def _of_distributed(tensor: DTensor) -> Placed:
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = tensor.to_local().detach()
    assert len(chunks) == 1, "torch gives one chunk to a rank"
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    everything = tuple(slice(0, size) for size in sizes)
    parts = (Part(offsets, sizes, everything),) if local.numel() else ()
    return Placed(local, tuple(tensor.shape), parts)


def unfit(tensors: Mapping[str, object]) -> list[Problem]:
    """Say which of them cannot be saved."""
    problems = []
    for name, given in tensors.items():
        tensor = given.tensor if isinstance(given, Placed | BlockScales) else given
        if not isinstance(tensor, torch.Tensor):
            what, fix = f"a {type(tensor).__name__} is no tensor", "put it into `extra`"
            problems.append(Problem(name, what, fix))
        elif tensor.is_meta:
            problems.append(Problem(name, "it is on `meta` and has no data", "materialise it"))
        else:
            try:
                dtype_name(tensor.dtype, name)
            except InputError as error:
                problems += error.problems
    return problems
