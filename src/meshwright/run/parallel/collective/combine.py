"""How two contributions become one, for each kind of reduction."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.collective.homes import Run

Reduce = Literal["sum", "avg", "max", "min"]
REDUCTIONS: tuple[Reduce, ...] = get_args(Reduce)

Combine = Callable[..., torch.Tensor]

_COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combiner(reduce: Reduce, dtype: torch.dtype) -> Combine:
    """Return the function that combines two tensors, called with `out=`."""
    if reduce not in _COMBINE:
        fix = f"use one of {', '.join(REDUCTIONS)}"
        raise InputError([Problem("reduce", f"{reduce!r} is no reduction", fix)])
    if reduce == "avg" and not dtype.is_floating_point:
        what = f"an average of {dtype} is not a {dtype}"
        raise InputError([Problem("reduce", what, "use sum, or a floating type")])
    return _COMBINE[reduce]


def store_runs(
    tensors: Sequence[torch.Tensor],
    frame: torch.Tensor,
    writes: tuple[Run, ...],
    bases: tuple[Run, ...],
    combine: Combine,
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


def fill_frame(
    tensors: Sequence[torch.Tensor], frame: torch.Tensor, reads: tuple[Run, ...]
) -> None:
    """Gather runs into a frame."""
    begin = 0
    for tensor, start, length in reads:
        frame[begin : begin + length].copy_(tensors[tensor][start : start + length])
        begin += length
