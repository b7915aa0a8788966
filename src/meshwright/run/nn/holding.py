"""`Holding`: which part of a parameter one rank holds, as ranges of each axis of the whole.

A slice may be made of several ranges: a rank's share of `qkv.weight` has its queries' rows, then
its keys', then its values'. Everything that depends on where a number stands in the whole model
(first values, checkpoints, random rounding) asks here, so that no result depends on the layout.
"""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor


class Range(NamedTuple):
    """Neighbouring places along one axis."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.stop - self.start


class Box(NamedTuple):
    """A part of a parameter without gaps, and where it lies in what the rank holds."""

    whole: tuple[Range, ...]
    """Where it lies in the whole parameter, by axis."""
    local: tuple[Range, ...]
    """Where it lies in the rank's tensor."""


@dataclass(frozen=True, slots=True)
class Holding:
    """How one rank holds one parameter."""

    whole: tuple[int, ...]
    """Shape in the whole model."""
    parts: tuple[tuple[Range, ...], ...]
    """For every axis the ranges held, in the order they lie in."""
    expert: bool = False
    """Belongs to a routed expert: its replicas are those of the experts."""
    partial: str = ""
    """The group whose ranks each have a part of the gradient that is theirs to add up; none where
    the gradient is whole on every rank."""
    twins: int = 1
    """How many neighbouring ranks of the tensor-parallel group hold the same keys and values:
    more than one where there are fewer key and value heads than ranks."""
    twin_rows: Range | None = None
    """Rows of the rank's tensor that these ranks share, each with a part of the gradient."""
    stages: str = ""
    """The group of pipeline ranks that hold the same, each with a part of the gradient; none where
    one stage alone holds it."""

    @classmethod
    def all_of(
        cls, whole: tuple[int, ...], *, expert: bool = False, partial: str = ""
    ) -> "Holding":
        """Hold everything."""
        parts = tuple((Range(0, size),) for size in whole)
        return cls(whole, parts, expert, partial)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is held."""
        return tuple(sum(part.size for part in axis) for axis in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to others."""
        return self.shape == self.whole

    def take(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor that is held: a view, or a copy where it has gaps."""
        for axis, ranges in enumerate(self.parts):
            pieces = [tensor.narrow(axis, part.start, part.size) for part in ranges]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return tensor

    def boxes(self) -> list[Box]:
        """Return the parts without gaps that make up what is held."""
        placed = []
        for ranges in self.parts:
            at, axis = 0, []
            for part in ranges:
                axis.append((part, Range(at, at + part.size)))
                at += part.size
            placed.append(axis)
        return [
            Box(tuple(whole for whole, _ in pairs), tuple(local for _, local in pairs))
            for pairs in product(*placed)
            if all(whole.size for whole, _ in pairs)
        ]

    def places(self, device: torch.device | str) -> list[Tensor]:
        """Return for every axis the numbers, in the whole, of the places held."""
        return [
            torch.cat([torch.arange(part.start, part.stop, device=device) for part in axis])
            for axis in self.parts
        ]


def even(size: int, ranks: int, index: int, *, offset: int = 0) -> Range:
    """Return one rank's share of so many places; the last ranks get less where they must."""
    each = -(-size // ranks)
    return Range(offset + min(index * each, size), offset + min((index + 1) * each, size))
