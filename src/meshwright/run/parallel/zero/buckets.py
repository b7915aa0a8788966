"""`GradientBucket`: parameters whose gradients travel together, as places in one flat tensor.

Buckets are filled in reverse order of use, so that the first is complete soonest in backward. What
else has to be summed over the same ranks (`ShardSpec.grad_sum_group`) lies side by side, so that
one collective over a slice does it. Every parameter begins at a multiple of 256 elements and so
does every rank's part: blocks of 8-bit moments lie as they do in a whole parameter, and addresses
are aligned. Nothing here knows groups or holds tensors.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

BUCKET_BYTES = 25 << 20
"""Gradients of a bucket: large enough for the links' full speed (PyTorch's DDP uses the same),
small enough that the first leaves early."""
ALIGNMENT = 256
"""Elements; `kernels.optimizer.block_quantization.BLOCK_ELEMENTS` is the same."""


class BucketRequest(NamedTuple):
    """A parameter to be put into a bucket."""

    name: str
    elements: int
    dtype: torch.dtype
    """Of the weight."""
    is_expert: bool = False
    """Its replicas are those of experts."""
    grad_sum_group: str = ""
    """The group over which its gradient is summed first; see `ShardSpec`."""
    chunks: frozenset[int] = frozenset({0})
    """The chunks of this rank that use it: it is complete after the backward passes of all."""
    shared_stage_group: str = ""
    """The group of other stages that hold it too; summed over only after all passes, as stages do
    not run them at the same time."""
    fsdp_unit: str = ""
    """What it is gathered with, where parameters are sharded."""


class BucketMember(NamedTuple):
    """A parameter's place in a bucket."""

    name: str
    start: int
    elements: int

    @property
    def stop(self) -> int:
        """The place behind its last element."""
        return self.start + self.elements


class PartialSumSlice(NamedTuple):
    """A run of places that one more group sums."""

    group: str
    start: int
    stop: int


class GradientBucket(NamedTuple):
    """Parameters side by side."""

    members: tuple[BucketMember, ...]
    elements: int
    """Of the flat tensor, with what is added so that it divides."""
    dtype: torch.dtype
    is_expert: bool
    chunks: frozenset[int]
    shared_stage_group: str
    fsdp_unit: str
    partial_sum_slices: tuple[PartialSumSlice, ...]


def fill_buckets(
    wanted: Sequence[BucketRequest],
    *,
    parts: int,
    expert_parts: int,
    element_bytes: int,
    bucket_bytes: int = BUCKET_BYTES,
    by_unit: bool = False,
) -> list[GradientBucket]:
    """Put parameters, given in order of use, into buckets, in the order these are complete in.

    A bucket is cut into `parts` for as many ranks, one of experts into `expert_parts`. With
    `by_unit` a bucket is what is gathered together, of any size; else `bucket_bytes` says when one
    is full. `element_bytes` are those of a gradient.
    """
    filling: dict[tuple[object, ...], list[tuple[int, BucketRequest]]] = {}
    done: list[tuple[int, GradientBucket]] = []

    def close(held: list[tuple[int, BucketRequest]]) -> None:
        first = held[0][1]
        bucket = lay_out_bucket(
            [each for _, each in held], expert_parts if first.is_expert else parts
        )
        done.append((held[-1][0], bucket))

    for position, each in enumerate(reversed(wanted)):
        key = (
            each.dtype,
            each.is_expert,
            each.chunks,
            each.shared_stage_group,
            each.fsdp_unit if by_unit else None,
        )
        held = filling.setdefault(key, [])
        held.append((position, each))
        full = sum(other.elements for _, other in held) * element_bytes >= bucket_bytes
        if full and not by_unit:
            close(filling.pop(key))
    for held in filling.values():
        close(held)
    # A bucket is complete when its last parameter is; what is shared with other stages comes last.
    return [
        bucket
        for _, bucket in sorted(done, key=lambda pair: (bool(pair[1].shared_stage_group), pair[0]))
    ]


def lay_out_bucket(wanted: Sequence[BucketRequest], parts: int) -> GradientBucket:
    """Lay parameters side by side in a flat tensor that divides into aligned parts."""
    members: list[BucketMember] = []
    partials: list[PartialSumSlice] = []
    at = 0
    for each in sorted(wanted, key=lambda each: each.grad_sum_group):
        members.append(BucketMember(each.name, at, each.elements))
        stop = align_up(at + each.elements, ALIGNMENT)
        if each.grad_sum_group and partials and partials[-1].group == each.grad_sum_group:
            partials[-1] = partials[-1]._replace(stop=stop)
        elif each.grad_sum_group:
            partials.append(PartialSumSlice(each.grad_sum_group, at, stop))
        at = stop
    first = wanted[0]
    return GradientBucket(
        tuple(members),
        align_up(at, ALIGNMENT * parts),
        first.dtype,
        first.is_expert,
        first.chunks,
        first.shared_stage_group,
        first.fsdp_unit,
        tuple(partials),
    )


def align_up(size: int, multiple: int) -> int:
    """Return the next multiple that is no less."""
    return -(-size // multiple) * multiple


class BucketPiece(NamedTuple):
    """What a range of a bucket has of a parameter."""

    name: str
    bucket_offset: int
    """Its first place in the range."""
    start: int
    """Its first element, counted in the rank's flattened parameter."""
    stop: int


def list_pieces_in_range(
    members: Iterable[BucketMember], start: int, stop: int
) -> list[BucketPiece]:
    """Return what lies from one place of a bucket to another."""
    found = []
    for member in members:
        low, high = max(start, member.start), min(stop, member.stop)
        if low < high:
            found.append(
                BucketPiece(member.name, low - start, low - member.start, high - member.start)
            )
    return found
