"""Slices of weights as bytes, and back; each parcel ends with a seal.

The seal holds the version, the plan and two sums over the parcel's words, plain and by position.
They are computed where the bytes lie, on a GPU too: sums of 64 bits that wrap are the same in any
order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.policy.transfer import ROW_SCALES, Parcel, Slice
from meshwright.run.kernels.quantize_fp8 import E4M3, quantize_rowwise
from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.weights.tensors import DTYPES, part_of

SEAL_BYTES = 32
_RUN_WORDS = 1 << 22
"""Words that a GPU sums at a time: what sums need beside a parcel stays small."""
_HOST_RUN_WORDS = 1 << 15
"""The same on a processor, whose caches hold as many."""


class DamagedWeights(MeshwrightError):
    """A parcel is not what was sent, or not of this version."""


class Rows(NamedTuple):
    """A matrix in fp8 with a scale for each row."""

    data: Tensor
    scale: Tensor


def parcel_bytes(parcel: Parcel) -> int:
    """Return the bytes of a parcel with its seal."""
    return parcel.bytes + SEAL_BYTES


@torch.no_grad()
def pack(parcel: Parcel, tensors: dict[str, Placed], version: int, plan: int, into: Tensor) -> None:
    """Write a rank's slices and the seal into `into`, bytes on any device."""
    ends = (*parcel.starts[1:], parcel.bytes)
    for slice_, start, end in zip(parcel.slices, parcel.starts, ends, strict=True):
        if start + slice_.bytes < end:
            into[start + slice_.bytes : end].zero_()  # no slice fills it, but it is summed
        value = part_of(tensors[slice_.tensor], slice_).view
        made = cast(value, slice_.before)
        if isinstance(made, Rows):
            data, scale = _room(into, slice_, start, E4M3)
            data.copy_(made.data)
            assert scale is not None
            scale.copy_(made.scale)
        else:
            _room(into, slice_, start, DTYPES[slice_.wire])[0].copy_(made)
    seal = _seal(into[: parcel.bytes], version, plan)
    into[parcel.bytes :].copy_(seal.view(torch.uint8))


def unpack(slice_: Slice, start: int, bytes_: Tensor) -> Tensor | Rows:
    """Return what a parcel has of a slice, in the format of the wire: views of the parcel."""
    if slice_.wire == ROW_SCALES:
        data, scale = _room(bytes_, slice_, start, E4M3)
        assert scale is not None
        return Rows(data, scale)
    return _room(bytes_, slice_, start, DTYPES[slice_.wire])[0]


def verify(parcel: Parcel, bytes_: Tensor, version: int, plan: int) -> None:
    """Raise `DamagedWeights` where a parcel is not what this version should bring."""
    found = bytes_[parcel.bytes : parcel_bytes(parcel)].clone().view(torch.int64).tolist()
    right = _seal(bytes_[: parcel.bytes], version, plan).tolist()
    if found == right:
        return
    if found[1] != right[1]:
        what = "it was packed by another plan: let both sides make it from the same layouts"
    elif found[0] != right[0]:
        what = f"it brings version {found[0]}, version {version} is awaited"
    else:
        what = "its checksum is wrong: it was damaged on the way; send this version again"
    names = ", ".join(dict.fromkeys(each.tensor for each in parcel.slices[:3]))
    raise DamagedWeights(f"parcel {parcel.number} from source {parcel.source} ({names}, …): {what}")


def cast(value: Tensor, formats: tuple[str, ...]) -> Tensor | Rows:
    """Take numbers through formats, the first being the one they have."""
    for name in formats[1:]:
        if name == ROW_SCALES:
            made = quantize_rowwise(value.contiguous()).direct
            return Rows(made.data, made.scale)
        value = value.to(DTYPES[name])
    return value


def _room(
    bytes_: Tensor, slice_: Slice, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the numbers of a slice within a parcel, and the scales of their rows."""
    scale = None
    if slice_.wire == ROW_SCALES:
        # In front of the codes, where floats are aligned.
        rows = slice_.box.sizes[0]
        scale = bytes_[start : start + 4 * rows].view(torch.float32).view(rows, 1)
        start += 4 * rows
    end = start + slice_.box.elements * dtype.itemsize
    return bytes_[start:end].view(dtype).view(slice_.box.sizes), scale


def _seal(payload: Tensor, version: int, plan: int) -> Tensor:
    words = payload.view(torch.int64)
    size = _RUN_WORDS if words.is_cuda else _HOST_RUN_WORDS
    at = torch.arange(1, 1 + min(size, len(words)), device=words.device)
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    placed = torch.zeros_like(plain)
    for first in range(0, len(words), size):
        run = words[first : first + size]
        total = run.sum()
        plain += total
        # No GPU multiplies integers and adds them up in one go; a processor does.
        own = at[: len(run)]
        placed += ((run * own).sum() if run.is_cuda else torch.dot(run, own)) + first * total
    named = torch.tensor([version, plan], dtype=torch.int64, device=words.device)
    return torch.cat((named, plain.view(1), placed.view(1)))
