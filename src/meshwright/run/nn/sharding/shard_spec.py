"""`ShardSpec`: which part of a parameter one rank holds, as ranges of each axis of the whole.

A slice may be made of several ranges: a rank's share of `qkv.weight` has its queries' rows, then
its keys', then its values'. Everything that depends on where a number stands in the whole model
(first values, checkpoints, random rounding) asks here, so that no result depends on the layout.
"""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor


class IndexRange(NamedTuple):
    """Neighbouring places along one axis."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.stop - self.start


class ShardBox(NamedTuple):
    """A part of a parameter without gaps, and where it lies in what the rank holds."""

    global_ranges: tuple[IndexRange, ...]
    """Where it lies in the whole parameter, by axis."""
    local_ranges: tuple[IndexRange, ...]
    """Where it lies in the rank's tensor."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How one rank holds one parameter."""

    global_shape: tuple[int, ...]
    """Shape in the whole model."""
    ranges: tuple[tuple[IndexRange, ...], ...]
    """For every axis the ranges held, in the order they lie in."""
    is_expert: bool = False
    """Belongs to a routed expert: its replicas are those of the experts."""
    grad_sum_group: str = ""
    """The group whose ranks each have a part of the gradient that is theirs to add up; none where
    the gradient is whole on every rank."""
    kv_replicas: int = 1
    """How many neighbouring ranks of the tensor-parallel group hold the same keys and values:
    more than one where there are fewer key and value heads than ranks."""
    kv_replica_rows: IndexRange | None = None
    """Rows of the rank's tensor that these ranks share, each with a part of the gradient."""
    shared_stage_group: str = ""
    """The group of pipeline ranks that hold the same, each with a part of the gradient; none where
    one stage alone holds it."""

    @classmethod
    def unsharded(
        cls, whole: tuple[int, ...], *, expert: bool = False, partial: str = ""
    ) -> "ShardSpec":
        """Hold everything."""
        parts = tuple((IndexRange(0, size),) for size in whole)
        return cls(whole, parts, expert, partial)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is held."""
        return tuple(sum(part.size for part in axis) for axis in self.ranges)

    @property
    def is_unsharded(self) -> bool:
        """Whether nothing is left to others."""
        return self.shape == self.global_shape

    def select_local(self, tensor: Tensor) -> Tensor:
        """Return the local part of a whole tensor: a view, or a copy where it is not contiguous."""
        for axis, ranges in enumerate(self.ranges):
            pieces = [tensor.narrow(axis, part.start, part.size) for part in ranges]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return tensor

    def list_boxes(self) -> list[ShardBox]:
        """Return the contiguous parts that make up the shard."""
        placed = []
        for ranges in self.ranges:
            at, axis = 0, []
            for part in ranges:
                axis.append((part, IndexRange(at, at + part.size)))
                at += part.size
            placed.append(axis)
        return [
            ShardBox(tuple(whole for whole, _ in pairs), tuple(local for _, local in pairs))
            for pairs in product(*placed)
            if all(whole.size for whole, _ in pairs)
        ]

    def global_indices(self, device: torch.device | str) -> list[Tensor]:
        """Return for every axis the numbers, in the whole, of the places held."""
        return [
            torch.cat([torch.arange(part.start, part.stop, device=device) for part in axis])
            for axis in self.ranges
        ]


def split_evenly(size: int, ranks: int, index: int, *, offset: int = 0) -> IndexRange:
    """Return one rank's share of so many places; the last ranks get less where they must."""
    each = -(-size // ranks)
    return IndexRange(offset + min(index * each, size), offset + min((index + 1) * each, size))
