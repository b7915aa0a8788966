"""Slices of weights as bytes, and back; each parcel ends with a seal.

The seal holds the version, the plan and two sums over the parcel's words, plain and by position.
Words are mixed before they are summed, each by its place: bits that flip at the upper end of words
would otherwise cancel, and so would words that change places in pairs. All of it is computed where
the bytes lie, on a GPU too: sums of 64 bits that wrap are the same in any order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.policy.resharding.weight_transfer import FP8_ROWWISE, TensorSlice, WeightBucket
from meshwright.run.kernels.fp8.quantization import E4M3, quantize_rowwise
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync.weight_tensors import DTYPES, get_slice_view

TRAILER_BYTES = 32
_ROW = 256
"""Words of a row: a parcel is summed as a matrix, whose rows and columns say where a word is."""
_RUN_ROWS = 1 << 14
"""Rows that a GPU mixes at a time: what that needs beside a parcel stays small."""
_HOST_RUN_ROWS = 1 << 7
"""The same on a processor, whose caches hold as many."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2⁶⁴ over the golden ratio, as a signed number: its multiples lie far from each other."""


class CorruptBucketError(MeshwrightError):
    """A parcel is not what was sent, or not of this version."""


class Fp8RowwiseTensor(NamedTuple):
    """A matrix in fp8 with a scale for each row."""

    data: Tensor
    scale: Tensor


def compute_bucket_bytes(bucket: WeightBucket) -> int:
    """Return the bytes of a parcel with its seal."""
    return bucket.size_bytes + TRAILER_BYTES


@torch.no_grad()
def pack_bucket(
    bucket: WeightBucket, tensors: dict[str, ShardedTensor], version: int, plan: int, into: Tensor
) -> None:
    """Write a rank's slices and the seal into `into`, bytes on any device."""
    ends = (*bucket.byte_offsets[1:], bucket.size_bytes)
    for slice_, start, end in zip(bucket.slices, bucket.byte_offsets, ends, strict=True):
        if start + slice_.size_bytes < end:
            into[start + slice_.size_bytes : end].zero_()  # no slice fills it, but it is summed
        value = get_slice_view(tensors[slice_.tensor_name], slice_).view
        made = cast_formats(value, slice_.source_casts)
        if isinstance(made, Fp8RowwiseTensor):
            data, scale = _room(into, slice_, start, E4M3)
            data.copy_(made.data)
            assert scale is not None
            scale.copy_(made.scale)
        else:
            _room(into, slice_, start, DTYPES[slice_.wire_format])[0].copy_(made)
    seal = _seal(into[: bucket.size_bytes], version, plan)
    into[bucket.size_bytes :].copy_(seal.view(torch.uint8))


def unpack_slice(slice_: TensorSlice, start: int, bytes_: Tensor) -> Tensor | Fp8RowwiseTensor:
    """Return what a parcel has of a slice, in the format of the wire: views of the parcel."""
    if slice_.wire_format == FP8_ROWWISE:
        data, scale = _room(bytes_, slice_, start, E4M3)
        assert scale is not None
        return Fp8RowwiseTensor(data, scale)
    return _room(bytes_, slice_, start, DTYPES[slice_.wire_format])[0]


def verify_bucket(bucket: WeightBucket, bytes_: Tensor, version: int, plan: int) -> None:
    """Raise `CorruptBucketError` where a parcel is not what this version should bring."""
    found = (
        bytes_[bucket.size_bytes : compute_bucket_bytes(bucket)].clone().view(torch.int64).tolist()
    )
    right = _seal(bytes_[: bucket.size_bytes], version, plan).tolist()
    if found == right:
        return
    if found[1] != right[1]:
        what = "it was packed by another plan: let both sides make it from the same layouts"
    elif found[0] != right[0]:
        what = f"it brings version {found[0]}, version {version} is awaited"
    else:
        what = "its checksum is wrong: it was damaged on the way; send this version again"
    names = ", ".join(dict.fromkeys(each.tensor_name for each in bucket.slices[:3]))
    raise CorruptBucketError(
        f"bucket {bucket.index} from source {bucket.source} ({names}, …): {what}"
    )


def cast_formats(value: Tensor, formats: tuple[str, ...]) -> Tensor | Fp8RowwiseTensor:
    """Take numbers through formats, the first being the one they have."""
    for name in formats[1:]:
        if name == FP8_ROWWISE:
            made = quantize_rowwise(value.contiguous()).direct
            return Fp8RowwiseTensor(made.data, made.scale)
        value = value.to(DTYPES[name])
    return value


def _room(
    bytes_: Tensor, slice_: TensorSlice, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the numbers of a slice within a parcel, and the scales of their rows."""
    scale = None
    if slice_.wire_format == FP8_ROWWISE:
        # In front of the codes, where floats are aligned.
        rows = slice_.box.sizes[0]
        scale = bytes_[start : start + 4 * rows].view(torch.float32).view(rows, 1)
        start += 4 * rows
    end = start + slice_.box.num_elements * dtype.itemsize
    return bytes_[start:end].view(dtype).view(slice_.box.sizes), scale


def _seal(payload: Tensor, version: int, plan: int) -> Tensor:
    words = payload.view(torch.int64)
    count = -(-len(words) // _ROW)
    down, across = (torch.arange(1, 1 + n, device=words.device) for n in (count, _ROW))
    keys, factors = across * _ODD, (2 * down + 1) * _ODD
    size = min(count, _RUN_ROWS if words.is_cuda else _HOST_RUN_ROWS)
    room = torch.empty((size, _ROW), dtype=torch.int64, device=words.device)
    of_rows, of_columns = torch.zeros_like(down), torch.zeros_like(across)
    for first in range(0, count, max(1, size)):
        run = _rows(words[first * _ROW : (first + size) * _ROW])
        here = slice(first, first + len(run))
        mixed = torch.bitwise_xor(run, keys, out=room[: len(run)])
        _fold(mixed)
        mixed *= factors[here, None]
        _fold(mixed)
        of_rows[here] = mixed.sum(1)
        of_columns += mixed.sum(0)
    # Σ place · word, without a product for each word: a place is row · length + column.
    placed = _ROW * (of_rows * down).sum() + (of_columns * across).sum()
    named = torch.tensor([version, plan], dtype=torch.int64, device=words.device)
    return torch.cat((named, of_rows.sum().view(1), placed.view(1)))


def _rows(words: Tensor) -> Tensor:
    """Return words as rows, the last one filled up with zeros."""
    missing = -len(words) % _ROW
    return (torch.nn.functional.pad(words, (0, missing)) if missing else words).view(-1, _ROW)


def _fold(words: Tensor) -> None:
    """Put w ^ (w >>> 32) in the place of every word; torch's own shift copies the sign."""
    halves = words.view(torch.int32)
    halves[:, ::2].bitwise_xor_(halves[:, 1::2])
