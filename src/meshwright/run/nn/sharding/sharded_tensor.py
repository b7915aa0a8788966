"""`ShardedTensor`: a tensor that is part of a whole, and where in the whole its numbers belong.

What a rank of a layout has of a parameter, or of something kept beside one, in terms of the whole
alone: checkpoints are written and read in these terms, so they know no layout. `BlockScales` are
numbers of how a rank's elements follow one another, which is told along with them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from torch import Tensor

from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec

AxisRanges = tuple[tuple[IndexRange, ...], ...]
GlobalBox = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a box of the whole begins along every axis, and how far it goes."""


class ShardChunk(NamedTuple):
    """A box of the whole, and where its values are stored in the tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_slices: tuple[slice, ...]
    """Slices that select the box's values in the tensor, in the box's order."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor:
    """A tensor whose parts are boxes of a whole."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    """Shape of the whole."""
    chunks: tuple[ShardChunk, ...]

    def __post_init__(self) -> None:
        for part in self.chunks:
            ends = zip(part.offsets, part.sizes, self.global_shape, strict=True)
            if any(first < 0 or size < 0 or first + size > all_ for first, size, all_ in ends):
                raise ValueError(f"{part} is outside of {self.global_shape}")

    @classmethod
    def unsharded(cls, tensor: Tensor) -> "ShardedTensor":
        """Place a tensor that is the whole."""
        shape = tuple(tensor.shape)
        local = tuple(slice(0, size) for size in shape)
        return cls(tensor, shape, (ShardChunk((0,) * len(shape), shape, local),))

    @classmethod
    def from_spec(cls, tensor: Tensor, holding: ShardSpec) -> "ShardedTensor":
        """Place what a rank holds of a parameter, or a tensor of the same shape."""
        if tuple(tensor.shape) != holding.shape:
            raise ValueError(f"the tensor is {tuple(tensor.shape)}, {holding.shape} is held")
        parts = (
            ShardChunk(
                tuple(each.start for each in box.global_ranges),
                tuple(each.size for each in box.global_ranges),
                tuple(slice(each.start, each.stop) for each in box.local_ranges),
            )
            for box in holding.list_boxes()
        )
        return cls(tensor, holding.global_shape, tuple(parts))

    @classmethod
    def from_flat_range(
        cls, tensor: Tensor, holding: ShardSpec, start: int, stop: int
    ) -> "ShardedTensor":
        """Place the elements from `start` to `stop` of what a rank holds, one after the other."""
        if tensor.dim() != 1 or tensor.numel() != stop - start:
            raise ValueError(f"the tensor is {tuple(tensor.shape)}, not one row of {stop - start}")
        held = math.prod(holding.shape)
        if not 0 <= start <= stop <= held:
            raise ValueError(f"{start} to {stop} is outside of the {held} elements held")
        parts: list[ShardChunk] = []
        for offsets, sizes in _runs(_merged(holding), start, stop):
            at = parts[-1].local_slices[0].stop if parts else 0
            parts.append(ShardChunk(offsets, sizes, (slice(at, at + math.prod(sizes)),)))
        return cls(tensor, holding.global_shape, tuple(parts))

    def view_chunk(self, part: ShardChunk) -> Tensor:
        """Return the numbers of a part as its box: what is written there is in the tensor."""
        found = self.tensor.detach()[part.local_slices]
        return found if tuple(found.shape) == part.sizes else found.view(part.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class BlockScales:
    """The scales of 8-bit moments: one for every 256 elements, counted along what a rank holds.

    Under another layout other elements share a scale; who loads there has to know which did.
    """

    tensor: Tensor
    codes_name: str
    """Name of the tensor whose scales they are."""
    global_shape: tuple[int, ...]
    """Shape of the whole of it."""
    global_boxes: tuple[GlobalBox, ...]
    """Boxes of the whole: their elements, box after box, are those held, in their order."""

    @classmethod
    def from_spec(
        cls, tensor: Tensor, codes: str, holding: ShardSpec, start: int = 0, stop: int | None = None
    ) -> "BlockScales":
        """Place the scales of the elements from `start` to `stop` of what is held."""
        end = math.prod(holding.shape) if stop is None else stop
        return cls(tensor, codes, holding.global_shape, tuple(_runs(_merged(holding), start, end)))

    @property
    def layout_key(self) -> str:
        """The same for the same elements in the same order; empty for a whole parameter."""
        if self.global_boxes == (((0,) * len(self.global_shape), self.global_shape),):
            return ""
        order = repr((self.global_shape, list(self.global_boxes)))
        return sha256(order.encode()).hexdigest()[:16]


def _merged(holding: ShardSpec) -> AxisRanges:
    """Return the ranges of every axis with neighbours made one and empty ones left out."""
    axes = []
    for ranges in holding.ranges:
        merged: list[IndexRange] = []
        for each in ranges:
            if merged and merged[-1].stop == each.start:
                merged[-1] = IndexRange(merged[-1].start, each.stop)
            elif each.size:
                merged.append(each)
        axes.append(tuple(merged))
    return tuple(axes)


def _runs(axes: AxisRanges, start: int, stop: int) -> Iterator[GlobalBox]:
    """Cut elements `start` to `stop` of what is held into boxes of the whole, in their order.

    Each box's elements follow one another: a rest of a row, whole rows, a beginning of a row. Where
    a row itself is not contiguous, every row is cut by itself.
    """
    if start >= stop:
        return
    if not axes:
        yield (), ()
        return
    rows, *inner = axes
    width = math.prod(sum(each.size for each in axis) for axis in inner)
    solid = all(len(axis) == 1 for axis in inner)
    while start < stop:
        row, column = divmod(start, width)
        count = (stop - start) // width
        if solid and not column and count:
            done = 0
            for offset, size in _held(rows, row, row + count):
                yield (
                    (offset, *(axis[0].start for axis in inner)),
                    (size, *(axis[0].size for axis in inner)),
                )
                done += size
            start += done * width
            continue
        last = min(stop, (row + 1) * width)
        ((offset, _),) = _held(rows, row, row + 1)
        for offsets, sizes in _runs(tuple(inner), column, column + last - start):
            yield (offset, *offsets), (1, *sizes)
        start = last


def _held(ranges: Sequence[IndexRange], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Return where the rows `start` to `stop` of those held begin in the whole, and how many."""
    at = 0
    for each in ranges:
        first, last = max(start, at), min(stop, at + each.size)
        if first < last:
            yield each.start + first - at, last - first
        at += each.size
