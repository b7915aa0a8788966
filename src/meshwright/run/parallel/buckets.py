"""`Bucket`: parameters whose gradients travel together, as places in one flat tensor.

Buckets are filled in reverse order of use, so that the first is complete soonest in backward. What
else has to be summed over the same ranks (`Holding.partial`) lies side by side, so that one
collective over a slice does it. Every parameter begins at a multiple of 256 elements and so does
every rank's part: blocks of 8-bit moments lie as they do in a whole parameter, and addresses are
aligned. Nothing here knows groups or holds tensors.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

BUCKET_BYTES = 25 << 20
"""Gradients of a bucket: large enough for the links' full speed (PyTorch's DDP uses the same),
small enough that the first leaves early."""
ALIGNMENT = 256
"""Elements; `kernels.block_codes.BLOCK_ELEMENTS` is the same."""


class Wanted(NamedTuple):
    """A parameter to be put into a bucket."""

    name: str
    elements: int
    dtype: torch.dtype
    """Of the weight."""
    expert: bool = False
    """Its replicas are those of experts."""
    partial: str = ""
    """The group over which its gradient is summed first; see `Holding`."""
    chunks: frozenset[int] = frozenset({0})
    """The chunks of this rank that use it: it is complete after the backward passes of all."""
    stages: str = ""
    """The group of other stages that hold it too; summed over only after all passes, as stages do
    not run them at the same time."""
    unit: str = ""
    """What it is gathered with, where parameters are sharded."""


class Member(NamedTuple):
    """A parameter's place in a bucket."""

    name: str
    start: int
    elements: int

    @property
    def stop(self) -> int:
        """The place behind its last element."""
        return self.start + self.elements


class Slice(NamedTuple):
    """A run of places that one more group sums."""

    group: str
    start: int
    stop: int


class Bucket(NamedTuple):
    """Parameters side by side."""

    members: tuple[Member, ...]
    elements: int
    """Of the flat tensor, with what is added so that it divides."""
    dtype: torch.dtype
    expert: bool
    chunks: frozenset[int]
    stages: str
    unit: str
    partials: tuple[Slice, ...]


def fill(
    wanted: Sequence[Wanted],
    *,
    parts: int,
    expert_parts: int,
    element_bytes: int,
    bucket_bytes: int = BUCKET_BYTES,
    by_unit: bool = False,
) -> list[Bucket]:
    """Put parameters, given in order of use, into buckets, in the order these are complete in.

    A bucket is cut into `parts` for as many ranks, one of experts into `expert_parts`. With
    `by_unit` a bucket is what is gathered together, of any size; else `bucket_bytes` says when one
    is full. `element_bytes` are those of a gradient.
    """
    filling: dict[tuple[object, ...], list[tuple[int, Wanted]]] = {}
    done: list[tuple[int, Bucket]] = []

    def close(held: list[tuple[int, Wanted]]) -> None:
        first = held[0][1]
        bucket = lay_out([each for _, each in held], expert_parts if first.expert else parts)
        done.append((held[-1][0], bucket))

    for position, each in enumerate(reversed(wanted)):
        key = (each.dtype, each.expert, each.chunks, each.stages, each.unit if by_unit else None)
        held = filling.setdefault(key, [])
        held.append((position, each))
        full = sum(other.elements for _, other in held) * element_bytes >= bucket_bytes
        if full and not by_unit:
            close(filling.pop(key))
    for held in filling.values():
        close(held)
    # A bucket is complete when its last parameter is; what is shared with other stages comes last.
    return [bucket for _, bucket in sorted(done, key=lambda pair: (bool(pair[1].stages), pair[0]))]


def lay_out(wanted: Sequence[Wanted], parts: int) -> Bucket:
    """Lay parameters side by side in a flat tensor that divides into aligned parts."""
    members: list[Member] = []
    partials: list[Slice] = []
    at = 0
    for each in sorted(wanted, key=lambda each: each.partial):
        members.append(Member(each.name, at, each.elements))
        stop = aligned(at + each.elements, ALIGNMENT)
        if each.partial and partials and partials[-1].group == each.partial:
            partials[-1] = partials[-1]._replace(stop=stop)
        elif each.partial:
            partials.append(Slice(each.partial, at, stop))
        at = stop
    first = wanted[0]
    return Bucket(
        tuple(members),
        aligned(at, ALIGNMENT * parts),
        first.dtype,
        first.expert,
        first.chunks,
        first.stages,
        first.unit,
        tuple(partials),
    )


def aligned(size: int, multiple: int) -> int:
    """Return the next multiple that is no less."""
    return -(-size // multiple) * multiple


class Piece(NamedTuple):
    """What a range of a bucket has of a parameter."""

    name: str
    at: int
    """Its first place in the range."""
    start: int
    """Its first element, counted in the rank's flattened parameter."""
    stop: int


def pieces(members: Iterable[Member], start: int, stop: int) -> list[Piece]:
    """Return what lies from one place of a bucket to another."""
    found = []
    for member in members:
        low, high = max(start, member.start), min(stop, member.stop)
        if low < high:
            found.append(Piece(member.name, low - start, low - member.start, high - member.start))
    return found
