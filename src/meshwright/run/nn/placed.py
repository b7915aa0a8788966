"""`Placed`: a tensor that is part of a whole, and where in the whole its numbers belong.

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

from meshwright.run.nn.holding import Holding, Range

Axes = tuple[tuple[Range, ...], ...]
Run = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a box of the whole begins along every axis, and how far it goes."""


class Part(NamedTuple):
    """A box of the whole, and where its numbers lie in the tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[slice, ...]
    """What cuts the box's numbers out of the tensor, in the box's order."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A tensor whose parts are boxes of a whole."""

    tensor: Tensor
    whole: tuple[int, ...]
    """Shape of the whole."""
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            ends = zip(part.offsets, part.sizes, self.whole, strict=True)
            if any(first < 0 or size < 0 or first + size > all_ for first, size, all_ in ends):
                raise ValueError(f"{part} lies outside of {self.whole}")

    @classmethod
    def all_of(cls, tensor: Tensor) -> "Placed":
        """Place a tensor that is the whole."""
        shape = tuple(tensor.shape)
        local = tuple(slice(0, size) for size in shape)
        return cls(tensor, shape, (Part((0,) * len(shape), shape, local),))

    @classmethod
    def of(cls, tensor: Tensor, holding: Holding) -> "Placed":
        """Place what a rank holds of a parameter, or a tensor of the same shape."""
        if tuple(tensor.shape) != holding.shape:
            raise ValueError(f"the tensor is {tuple(tensor.shape)}, {holding.shape} is held")
        parts = (
            Part(
                tuple(each.start for each in box.whole),
                tuple(each.size for each in box.whole),
                tuple(slice(each.start, each.stop) for each in box.local),
            )
            for box in holding.boxes()
        )
        return cls(tensor, holding.whole, tuple(parts))

    @classmethod
    def of_interval(cls, tensor: Tensor, holding: Holding, start: int, stop: int) -> "Placed":
        """Place the elements from `start` to `stop` of what a rank holds, one after the other."""
        if tensor.dim() != 1 or tensor.numel() != stop - start:
            raise ValueError(f"the tensor is {tuple(tensor.shape)}, not one row of {stop - start}")
        held = math.prod(holding.shape)
        if not 0 <= start <= stop <= held:
            raise ValueError(f"{start} to {stop} lies outside of the {held} elements held")
        parts: list[Part] = []
        for offsets, sizes in _runs(_merged(holding), start, stop):
            at = parts[-1].local[0].stop if parts else 0
            parts.append(Part(offsets, sizes, (slice(at, at + math.prod(sizes)),)))
        return cls(tensor, holding.whole, tuple(parts))

    def view(self, part: Part) -> Tensor:
        """Return the numbers of a part as its box: what is written there is in the tensor."""
        found = self.tensor.detach()[part.local]
        return found if tuple(found.shape) == part.sizes else found.view(part.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class BlockScales:
    """The scales of 8-bit moments: one for every 256 elements, counted along what a rank holds.

    Under another layout other elements share a scale; who loads there has to know which did.
    """

    tensor: Tensor
    codes: str
    """Name of the tensor whose scales they are."""
    whole: tuple[int, ...]
    """Shape of the whole of it."""
    runs: tuple[Run, ...]
    """Boxes of the whole: their elements, box after box, are those held, in their order."""

    @classmethod
    def of(
        cls, tensor: Tensor, codes: str, holding: Holding, start: int = 0, stop: int | None = None
    ) -> "BlockScales":
        """Place the scales of the elements from `start` to `stop` of what is held."""
        end = math.prod(holding.shape) if stop is None else stop
        return cls(tensor, codes, holding.whole, tuple(_runs(_merged(holding), start, end)))

    @property
    def mark(self) -> str:
        """The same for the same elements in the same order; empty for a whole parameter."""
        if self.runs == (((0,) * len(self.whole), self.whole),):
            return ""
        order = repr((self.whole, list(self.runs)))
        return sha256(order.encode()).hexdigest()[:16]


def _merged(holding: Holding) -> Axes:
    """Return the ranges of every axis with neighbours made one and empty ones left out."""
    axes = []
    for ranges in holding.parts:
        merged: list[Range] = []
        for each in ranges:
            if merged and merged[-1].stop == each.start:
                merged[-1] = Range(merged[-1].start, each.stop)
            elif each.size:
                merged.append(each)
        axes.append(tuple(merged))
    return tuple(axes)


def _runs(axes: Axes, start: int, stop: int) -> Iterator[Run]:
    """Cut elements `start` to `stop` of what is held into boxes of the whole, in their order.

    Each box's elements follow one another: a rest of a row, whole rows, a beginning of a row. Where
    a row itself has gaps, every row is cut by itself.
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


def _held(ranges: Sequence[Range], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Return where the rows `start` to `stop` of those held begin in the whole, and how many."""
    at = 0
    for each in ranges:
        first, last = max(start, at), min(stop, at + each.size)
        if first < last:
            yield each.start + first - at, last - first
        at += each.size
