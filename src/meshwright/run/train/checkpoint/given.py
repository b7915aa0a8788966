"""What can be saved and loaded, each kind of tensor in terms of the whole it is part of."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.placed import Fixed, Part, Placed
from meshwright.run.train.checkpoint.image import dtype_name

Given = torch.Tensor | Placed | Fixed
"""A whole tensor, a `DTensor`, a part of a whole, or one that only the same layout can use."""
Tensors = Mapping[str, Given]

MARK = "@"
"""Stands between the name of a `Fixed` tensor and its mark."""


def placed_all(tensors: Tensors) -> dict[str, Placed]:
    """Return every tensor as part of a whole, under the name it is saved by."""
    found = {}
    for name, given in tensors.items():
        match given:
            case Placed():
                found[name] = given
            case Fixed():
                found[_marked(name, given)] = Placed.all_of(given.tensor)
            case DTensor():
                found[name] = _of_distributed(given)
            case _:
                found[name] = Placed.all_of(given)
    return found


def _marked(name: str, fixed: Fixed) -> str:
    return f"{name}{MARK}{fixed.mark}" if fixed.mark else name


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
        tensor = given.tensor if isinstance(given, Placed | Fixed) else given
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
