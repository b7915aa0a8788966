"""How two contributions become one, for each kind of reduction."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.collective.chunk_layout import ElementRun

ReduceOpName = Literal["sum", "avg", "max", "min"]
REDUCE_OPS: tuple[ReduceOpName, ...] = get_args(ReduceOpName)

CombineFn = Callable[..., torch.Tensor]

_COMBINE: dict[str, CombineFn] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def get_reduce_function(reduce: ReduceOpName, dtype: torch.dtype) -> CombineFn:
    """Return the function that combines two tensors, called with `out=`."""
    if reduce not in _COMBINE:
        fix = f"use one of {', '.join(REDUCE_OPS)}"
        raise InputError([Problem("reduce", f"{reduce!r} is no reduction", fix)])
    if reduce == "avg" and not dtype.is_floating_point:
        what = f"an average of {dtype} is not a {dtype}"
        raise InputError([Problem("reduce", what, "use sum, or a floating type")])
    return _COMBINE[reduce]


def scatter_frame(
    tensors: Sequence[torch.Tensor],
    frame: torch.Tensor,
    writes: tuple[ElementRun, ...],
    bases: tuple[ElementRun, ...],
    combine: CombineFn,
) -> None:
    """Put a frame where it belongs, added to what it is to be added to (where `bases` says so)."""
    begin = 0
    for index, (tensor, start, length) in enumerate(writes):
        into = tensors[tensor][start : start + length]
        part = frame[begin : begin + length] if len(writes) > 1 else frame[:length]
        if bases:
            base = bases[index]
            same = base.tensor == tensor and base.start == start
            other = into if same else tensors[base.tensor][base.start : base.start + length]
            combine(other, part, out=into)
        else:
            into.copy_(part)
        begin += length


def gather_frame(
    tensors: Sequence[torch.Tensor], frame: torch.Tensor, reads: tuple[ElementRun, ...]
) -> None:
    """Gather runs into a frame."""
    begin = 0
    for tensor, start, length in reads:
        frame[begin : begin + length].copy_(tensors[tensor][start : start + length])
        begin += length
