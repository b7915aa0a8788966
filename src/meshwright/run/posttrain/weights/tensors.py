"""What a rank that trains has to send, and what a rank that serves has to fill."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.boxes import Extent
from meshwright.policy.transfer import ROW_SCALES, Held, Slice
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.linear import Linear
from meshwright.run.nn.placed import Placed
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.sync import Sync
from meshwright.run.serve.model.quantise import Fp8Weights
from meshwright.run.train.optimizer.optimizer import Optimizer
from meshwright.run.train.placed_state import placed_state

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Memory of a served parameter."""

    placed: Placed
    formats: tuple[str, ...]
    """That of its numbers; before it, where that is fp8, the one they are rounded to first."""
    scale: Tensor | None = None
    """Scales of its rows, where it has some."""


class Part(NamedTuple):
    """A view of a tensor, and the box of the whole that it shows."""

    view: Tensor
    extent: Extent


def of_rank(spread: Spread) -> dict[str, Placed]:
    """Return the weights that a rank computes with: all of those that it holds.

    With ZeRO 3 they come and go; `of_sync` has what stays.
    """
    return {
        name: Placed.of(value.detach(), spread.holdings[name])
        for name, value in spread.decoder.named_parameters()
    }


def of_sync(sync: Sync) -> dict[str, Placed]:
    """Return the parts of weights that a rank updates."""
    lies, found = sync.lies(), {}
    for name, value in sync.named_parameters():
        holding, start, stop = lies[name]
        if (start, stop) == (0, math.prod(holding.shape)):
            found[name] = Placed.of(value.detach().view(holding.shape), holding)
        else:
            found[name] = Placed.of_interval(value.detach().view(-1), holding, start, stop)
    return found


def of_masters(sync: Sync, optimizer: Optimizer) -> dict[str, Placed]:
    """Return the most exact weights that a rank keeps: fp32 masters where there are any."""
    state, found = placed_state(sync, optimizer), {}
    for key, value in state.items():
        for room in ("model.", "optimizer.master."):
            if key.startswith(room) and isinstance(value, Placed):
                # Masters stand behind the model's own in the state, and replace them.
                found[key.removeprefix(room)] = value
    return found


def of_decoder(decoder: Decoder) -> dict[str, Placed]:
    """Return the weights of a model in one piece."""
    return {name: Placed.all_of(each.detach()) for name, each in decoder.named_parameters()}


def places(
    decoder: Decoder, holdings: Mapping[str, Holding] | None = None, *, base: str = "bf16"
) -> dict[str, Place]:
    """Return what a served model, or a rank's part of it, has to be filled.

    Numbers that are kept as fp8 are rounded to `base` first, as they are when a folder is read.
    """
    scales = {}
    for path, part in decoder.named_modules():
        if not isinstance(part, Linear) or part.low_precision is None:
            continue
        if not isinstance(part.low_precision, Fp8Weights):
            what = f"its weights are kept as {part.recipe}"
            raise InputError([Problem(path, what, "serve with weights in fp8, or as they are")])
        scales[f"{path}.weight"] = part.low_precision.scale
    found = {}
    for name, value in decoder.named_parameters():
        tensor = value.detach()
        whole = Holding.all_of(tuple(tensor.shape)) if holdings is None else holdings[name]
        scale = scales.get(name)
        formats = (format_of(name, tensor),) if scale is None else (base, ROW_SCALES)
        found[name] = Place(Placed.of(tensor, whole), formats, scale)
    return found


def held(tensors: Mapping[str, Placed] | Mapping[str, Place]) -> dict[str, Held]:
    """Return what a rank has, without the numbers: what plans are made of."""
    found = {}
    for name, each in tensors.items():
        placed = each.placed if isinstance(each, Place) else each
        own = each.formats if isinstance(each, Place) else (format_of(name, placed.tensor),)
        boxes = tuple(Extent(part.offsets, part.sizes) for part in placed.parts)
        found[name] = Held(own, placed.whole, boxes)
    return found


def part_of(placed: Placed, slice_: Slice) -> Part:
    """Return the view of a rank's tensor that a slice reads or writes."""
    for part in placed.parts:
        whole = Extent(part.offsets, part.sizes)
        if whole.contains(slice_.box):
            return Part(placed.view(part)[slice_.box.within(whole)], slice_.box)
    raise ValueError(f"{slice_.tensor} has no {slice_.box} here: the plan is of other ranks")


def format_of(name: str, tensor: Tensor) -> str:
    """Name the format of a tensor."""
    if tensor.dtype not in FORMATS:
        what = f"is {tensor.dtype}"
        raise InputError([Problem(name, what, f"send weights in {', '.join(DTYPES)}")])
    return FORMATS[tensor.dtype]
