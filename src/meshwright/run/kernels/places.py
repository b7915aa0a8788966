"""`Places`: where the elements of a shard stand in the whole tensor they are a part of.

Rounding by chance takes its bits from these places, so that no layout changes a bit. A shard is a
tensor's rows, some of its columns, rows of several stacked matrices, experts, or an interval of any
of these. All of them are written in one way: with p = start + i for the i-th element and
c = p mod period, its place is

    origin + (p div period) · stride + c + Σ jump over the gaps that begin at or before c

A shard without gaps is `origin + i`, which kernels do not have to look anything up for. Elsewhere
they divide by multiplying: n div d = (n · m) >> (31 + l) with l = ⌈log₂ d⌉ and m = ⌈2³¹⁺ˡ / d⌉ is
exact for n < 2³¹ (Granlund and Montgomery 1994, "Division by invariant integers using
multiplication", theorem 4.2).
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.run.kernels.language import tl, triton

MOST_PERIOD = 2**31 - 2**15
"""Elements of a period, so that a chunk that begins in one stays within 31 bits."""
_COLUMNS = 6
"""Numbers of a tensor in a table, before its gaps."""
_FIELDS = tl.constexpr(_COLUMNS)
_WORD = 1 << 32


class Gap(NamedTuple):
    """A point of a period behind which elements stand further on."""

    begin: int
    jump: int


class Places(NamedTuple):
    """The places of a shard's elements, in their order."""

    origin: int = 0
    start: int = 0
    period: int = 0
    """0 where all elements follow one another in the whole, from `origin` on."""
    stride: int = 0
    gaps: tuple[Gap, ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether elements that follow one another here do so in the whole."""
        return self.period == 0

    def of(self, elements: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the places of so many elements, as int64."""
        number = torch.arange(elements, device=device)
        if self.is_run:
            return number + self.origin
        number += self.start
        row, column = number // self.period, number % self.period
        found = self.origin + row * self.stride + column
        for gap in self.gaps:
            found += torch.where(column >= gap.begin, gap.jump, 0)
        return found


def most_gaps(places: Sequence[Places]) -> int:
    """Return what a launch has to look for: -1 where all shards are runs, else gaps of a period."""
    return max((-1 if each.is_run else len(each.gaps) for each in places), default=-1)


def table(places: Sequence[Places], device: torch.device) -> torch.Tensor:
    """Return int64 [tensors, numbers]: what `first_place` and `place_in_whole` read."""
    gaps = most_gaps(places)
    if gaps < 0:
        return torch.tensor([[each.origin] for each in places], device=device)
    return torch.tensor([_row(each, gaps) for each in places], device=device)


def _row(places: Places, gaps: int) -> list[int]:
    # A run is a single period; so long a one that every chunk of it lies in it.
    period = places.period or MOST_PERIOD
    stride = places.stride if places.period else MOST_PERIOD
    bits = (period - 1).bit_length()
    factor = -(-(1 << (31 + bits)) // period)
    never = [(_WORD - 1, 0)] * (gaps - len(places.gaps))
    numbers = [places.origin, places.start, period, stride, factor, bits]
    return [*numbers, *(number for gap in (*places.gaps, *never) for number in gap)]


@triton.jit
def first_place(places, tensor, start, GAPS: tl.constexpr):
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
def place_in_whole(way, lane, GAPS: tl.constexpr):
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
