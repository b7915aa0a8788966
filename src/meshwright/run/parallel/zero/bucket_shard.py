"""`BucketShard`: the part of a bucket's weights that one rank updates, and how all get the whole.

A bucket's parameters are views of one flat tensor. Its owner of a part updates that part alone;
gathering the parts over the group makes the whole. With ZeRO 1 and 2 the flat tensor stays (a part
is a slice of it), with ZeRO 3 only the part does: the flat tensor's memory comes and goes, while
all views of it stay valid, those that autograd has saved included. Writing to the flat tensor is no
change in autograd's eyes, as parameters count their own versions.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.run.kernels.optimizer.global_index import MAX_PERIOD, GlobalIndexMap, IndexGap
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.parallel.group_coordinator import AsyncWork, GroupCoordinator
from meshwright.run.parallel.zero.buckets import BucketPiece, GradientBucket, list_pieces_in_range


class ShardRange(NamedTuple):
    """Where what an optimizer updates lies: a run of the rank's flattened local parameter."""

    shard_spec: ShardSpec
    start: int
    stop: int


class BucketShard:
    """One rank's part of a bucket's weights."""

    def __init__(
        self,
        bucket: GradientBucket,
        parameters: Mapping[str, nn.Parameter],
        shard_specs: Mapping[str, ShardSpec],
        group: GroupCoordinator,
        *,
        reshard_after_forward: bool,
    ) -> None:
        """Move parameters into a flat tensor; `reshard_after_forward` is ZeRO 3."""
        self.bucket, self.group, self.reshard_after_forward = bucket, group, reshard_after_forward
        self.parameters = [parameters[member.name] for member in bucket.members]
        device = self.parameters[0].device
        self.flat = torch.zeros(bucket.elements, dtype=bucket.dtype, device=device)
        for member, parameter in zip(bucket.members, self.parameters, strict=True):
            place = self.flat[member.start : member.stop].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place
        size = bucket.elements // group.size
        self.start = group.index * size
        own = self.flat[self.start : self.start + size]
        self.local_shard = own.clone() if reshard_after_forward else own
        self.pieces: list[BucketPiece] = list_pieces_in_range(
            bucket.members, self.start, self.start + size
        )
        self.optimized_tensors = {
            each.name: _view(self.local_shard, each, shard_specs) for each in self.pieces
        }
        """What the optimizer updates, by the names of the parameters."""
        self._pending: AsyncWork | None = None
        self._here = True
        self.reshard()

    def split_by_parameter(self, own: Tensor) -> dict[str, Tensor]:
        """Return the pieces of a tensor that lies as the part does, such as its gradient."""
        return {
            each.name: own[each.bucket_offset : each.bucket_offset + each.stop - each.start]
            for each in self.pieces
        }

    def unshard(self) -> None:
        """Begin to gather the whole, unless it is here or on its way."""
        if self._here or self._pending is not None:
            return
        if self.reshard_after_forward:
            storage = self.flat.untyped_storage()
            storage.resize_(self.flat.numel() * self.flat.element_size())
        self._pending = self.group.start_all_gather(self.local_shard, into=self.flat)

    def wait_for_unshard(self) -> None:
        """Have the whole here."""
        if self._here:
            return
        self.unshard()
        assert self._pending is not None
        self._pending.wait()
        self._pending, self._here = None, True

    def reshard(self) -> None:
        """Give back the memory of the whole, where only the part stays."""
        if not self.reshard_after_forward:
            return
        if self._pending is not None:
            self._pending.wait()
        self._pending, self._here = None, False
        self.flat.untyped_storage().resize_(0)

    def invalidate(self) -> None:
        """Note that the parts are updated: the whole is no longer what it was."""
        self.reshard()
        if self._pending is not None:
            self._pending.wait()
        self._pending, self._here = None, False
        # Whoever keeps something made of a weight (its fp8 copies) asks for its version.
        torch.autograd.graph.increment_version(self.parameters)

    def copy_from_unsharded(self) -> None:
        """Let the part be what the whole has there, after the whole was written to."""
        if self.reshard_after_forward:
            self.local_shard.copy_(self.flat[self.start : self.start + len(self.local_shard)])


def _view(own: Tensor, piece: BucketPiece, shard_specs: Mapping[str, ShardSpec]) -> nn.Parameter:
    """Return a piece as a parameter that says what it is a piece of."""
    holding = shard_specs[piece.name]
    size = piece.stop - piece.start
    found = nn.Parameter(own[piece.bucket_offset : piece.bucket_offset + size])
    set_shard_info(found, holding, piece.start)
    return found


def set_shard_info(parameter: nn.Parameter, holding: ShardSpec, start: int) -> None:
    """Tell the optimizer the whole parameter's shape and where the elements of this one stand.

    Rounding by chance takes its bits from there, so that no layout changes them, and ranks that
    hold the same elements go on doing so.
    """
    parameter.global_shape = holding.global_shape  # type: ignore[attr-defined]
    parameter.global_index_map = make_global_index_map(holding, start)  # type: ignore[attr-defined]


def make_global_index_map(holding: ShardSpec, start: int) -> GlobalIndexMap:
    """Return where the elements of what a rank holds stand in the whole, from `start` on.

    The last axis that is cut may have several ranges; before it at most the first axis is cut, and
    into a single range. Holdings of any layout are such; others are refused.
    """
    cut = [
        axis
        for axis, (ranges, size) in enumerate(
            zip(holding.ranges, holding.global_shape, strict=True)
        )
        if tuple(each for each in ranges if each.size) != (IndexRange(0, size),)
    ]
    if not cut or not math.prod(holding.shape):
        return GlobalIndexMap(start)
    last, width = cut[-1], math.prod(holding.global_shape[cut[-1] + 1 :])
    if cut[:-1] not in ([], [0]) or (cut[:-1] and len(holding.ranges[0]) > 1):
        raise ValueError(f"{holding} is split in a way whose global indices have no formula")
    ranges = [each for each in holding.ranges[last] if each.size]
    stride = holding.global_shape[last] * width
    origin = ranges[0].start * width + (holding.ranges[0][0].start * _inner(holding) if last else 0)
    period, gaps = 0, []
    for before, each in pairwise((IndexRange(ranges[0].start, ranges[0].start), *ranges)):
        if each.start != before.stop:
            gaps.append(IndexGap(period, (each.start - before.stop) * width))
        period += each.size * width
    rows = math.prod(holding.shape[:last])
    if not gaps and rows == 1:
        return GlobalIndexMap(origin + start)
    if period > MAX_PERIOD:
        raise ValueError(f"{period:,} elements with gaps are more than {MAX_PERIOD:,}")
    return GlobalIndexMap(origin, start, period, stride, tuple(gaps))


def _inner(holding: ShardSpec) -> int:
    """Return how many elements a place along the first axis has."""
    return math.prod(holding.global_shape[1:])
