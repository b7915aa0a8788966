"""`GlobalIndexMap`: where the elements of a shard stand in the whole tensor they are a part of.

Rounding by chance takes its bits from these places, so that no layout changes a bit. A shard is a
tensor's rows, some of its columns, rows of several stacked matrices, experts, or an interval of any
of these. All of them are written in one way: with p = start + i for the i-th element and
c = p mod period, its place is

    base_offset + (p div period) · stride + c + Σ jump over the gaps that begin at or before c

A shard without gaps is `base_offset + i`, which kernels do not have to look anything up for.
Elsewhere they divide by multiplying: n div d = (n · m) >> (31 + l) with l = ⌈log₂ d⌉ and m = ⌈2³¹⁺ˡ
/ d⌉ is exact for n < 2³¹ (Granlund and Montgomery 1994, "Division by invariant integers using
multiplication", theorem 4.2).
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.run.kernels.triton_compat import tl, triton

MAX_PERIOD = 2**31 - 2**15
"""Elements of a period, so that a chunk that begins in one stays within 31 bits."""
_COLUMNS = 6
"""Numbers of a tensor in a table, before its gaps."""
_FIELDS = tl.constexpr(_COLUMNS)
_WORD = 1 << 32


class IndexGap(NamedTuple):
    """A point of a period behind which elements stand further on."""

    start: int
    jump: int


class GlobalIndexMap(NamedTuple):
    """The places of a shard's elements, in their order."""

    base_offset: int = 0
    start: int = 0
    period: int = 0
    """0 where all elements follow one another in the whole, from `base_offset` on."""
    stride: int = 0
    gaps: tuple[IndexGap, ...] = ()

    @property
    def is_contiguous(self) -> bool:
        """Whether elements that follow one another here do so in the whole."""
        return self.period == 0

    def from_ranges(self, elements: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the places of so many elements, as int64."""
        number = torch.arange(elements, device=device)
        if self.is_contiguous:
            return number + self.base_offset
        number += self.start
        row, column = number // self.period, number % self.period
        found = self.base_offset + row * self.stride + column
        for gap in self.gaps:
            found += torch.where(column >= gap.start, gap.jump, 0)
        return found


def count_max_gaps(places: Sequence[GlobalIndexMap]) -> int:
    """Return what a launch has to look for: -1 where all shards are runs, else gaps of a period."""
    return max((-1 if each.is_contiguous else len(each.gaps) for each in places), default=-1)


def make_index_table(places: Sequence[GlobalIndexMap], device: torch.device) -> torch.Tensor:
    """Return int64 [tensors, numbers] for `find_first_global_index` and `compute_global_index`."""
    gaps = count_max_gaps(places)
    if gaps < 0:
        return torch.tensor([[each.base_offset] for each in places], device=device)
    return torch.tensor([_row(each, gaps) for each in places], device=device)


def _row(places: GlobalIndexMap, gaps: int) -> list[int]:
    # A run is a single period; so long a one that every chunk of it lies in it.
    period = places.period or MAX_PERIOD
    stride = places.stride if places.period else MAX_PERIOD
    bits = (period - 1).bit_length()
    factor = -(-(1 << (31 + bits)) // period)
    never = [(_WORD - 1, 0)] * (gaps - len(places.gaps))
    numbers = [places.base_offset, places.start, period, stride, factor, bits]
    return [*numbers, *(number for gap in (*places.gaps, *never) for number in gap)]


@triton.jit
def find_first_global_index(places, tensor, start, GAPS: tl.constexpr):
    """Return the uint32 place a chunk's elements are counted from, and how to go on from there."""
    if GAPS < 0:
        way = ((tl.load(places + tensor) + start).to(tl.uint32),)
    else:
        row = places + tensor * (_FIELDS + 2 * GAPS)
        period = tl.load(row + 2)
        stride = tl.load(row + 3)
        position = tl.load(row + 1) + start
        rows = position // period
        way = (  # type: ignore[assignment]
            (tl.load(row) + rows * stride).to(tl.uint32),
            (position - rows * period).to(tl.uint32),
            period.to(tl.uint32),
            (stride - period).to(tl.uint32),
            tl.load(row + 4).to(tl.uint32),
            tl.load(row + 5).to(tl.uint32),
        )
        for number in tl.static_range(2 * GAPS):
            # Triton's tuples have no unpacking.
            way = way + (tl.load(row + _FIELDS + number).to(tl.uint32),)  # type: ignore[assignment]  # noqa: RUF005
    return way


@triton.jit
def compute_global_index(way, lane, GAPS: tl.constexpr):
    """Return the uint32 place of each element of a chunk, given its uint32 number there."""
    if GAPS < 0:
        place = way[0] + lane
    else:
        column = way[1] + lane
        rows = tl.umulhi(column * 2, way[4]) >> way[5]
        place = way[0] + column + rows * way[3]
        if GAPS > 0:
            column -= rows * way[2]
            for gap in tl.static_range(GAPS):
                place += tl.where(column >= way[6 + 2 * gap], way[7 + 2 * gap], 0)
    return place
