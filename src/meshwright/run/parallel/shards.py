"""`Shard`: the part of a bucket's weights that one rank updates, and how all get the whole.

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

from meshwright.run.kernels.places import MOST_PERIOD, Gap, Places
from meshwright.run.nn.holding import Holding, Range
from meshwright.run.parallel.buckets import Bucket, Piece, pieces
from meshwright.run.parallel.group import Group, Pending


class Lie(NamedTuple):
    """Where what an optimizer updates lies: a run of the rank's flattened local parameter."""

    holding: Holding
    start: int
    stop: int


class Shard:
    """One rank's part of a bucket's weights."""

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, nn.Parameter],
        holdings: Mapping[str, Holding],
        group: Group,
        *,
        comes_and_goes: bool,
    ) -> None:
        """Move parameters into a flat tensor; `comes_and_goes` is ZeRO 3."""
        self.bucket, self.group, self.comes_and_goes = bucket, group, comes_and_goes
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
        self.own = own.clone() if comes_and_goes else own
        self.pieces: list[Piece] = pieces(bucket.members, self.start, self.start + size)
        self.updated = {each.name: _view(self.own, each, holdings) for each in self.pieces}
        """What the optimizer updates, by the names of the parameters."""
        self._pending: Pending | None = None
        self._here = True
        self.free()

    def cut(self, own: Tensor) -> dict[str, Tensor]:
        """Return the pieces of a tensor that lies as the part does, such as its gradient."""
        return {each.name: own[each.at : each.at + each.stop - each.start] for each in self.pieces}

    def start_gathering(self) -> None:
        """Begin to gather the whole, unless it is here or on its way."""
        if self._here or self._pending is not None:
            return
        if self.comes_and_goes:
            storage = self.flat.untyped_storage()
            storage.resize_(self.flat.numel() * self.flat.element_size())
        self._pending = self.group.start_all_gather(self.own, into=self.flat)

    def whole(self) -> None:
        """Have the whole here."""
        if self._here:
            return
        self.start_gathering()
        assert self._pending is not None
        self._pending.wait()
        self._pending, self._here = None, True

    def free(self) -> None:
        """Give back the memory of the whole, where only the part stays."""
        if not self.comes_and_goes:
            return
        if self._pending is not None:
            self._pending.wait()
        self._pending, self._here = None, False
        self.flat.untyped_storage().resize_(0)

    def changed(self) -> None:
        """Note that the parts are updated: the whole is no longer what it was."""
        self.free()
        if self._pending is not None:
            self._pending.wait()
        self._pending, self._here = None, False
        # Whoever keeps something made of a weight (its fp8 copies) asks for its version.
        torch.autograd.graph.increment_version(self.parameters)

    def take_over(self) -> None:
        """Let the part be what the whole has there, after the whole was written to."""
        if self.comes_and_goes:
            self.own.copy_(self.flat[self.start : self.start + len(self.own)])


def _view(own: Tensor, piece: Piece, holdings: Mapping[str, Holding]) -> nn.Parameter:
    """Return a piece as a parameter that says what it is a piece of."""
    holding = holdings[piece.name]
    size = piece.stop - piece.start
    found = nn.Parameter(own[piece.at : piece.at + size])
    mark(found, holding, piece.start)
    return found


def mark(parameter: nn.Parameter, holding: Holding, start: int) -> None:
    """Tell the optimizer the whole parameter's shape and where the elements of this one stand.

    Rounding by chance takes its bits from there, so that no layout changes them, and ranks that
    hold the same elements go on doing so.
    """
    parameter.whole_shape = holding.whole  # type: ignore[attr-defined]
    parameter.places = places(holding, start)  # type: ignore[attr-defined]


def places(holding: Holding, start: int) -> Places:
    """Return where the elements of what a rank holds stand in the whole, from `start` on.

    The last axis that is cut may have several ranges; before it at most the first axis is cut, and
    into a single range. Holdings of any layout are such; others are refused.
    """
    cut = [
        axis
        for axis, (ranges, size) in enumerate(zip(holding.parts, holding.whole, strict=True))
        if tuple(each for each in ranges if each.size) != (Range(0, size),)
    ]
    if not cut or not math.prod(holding.shape):
        return Places(start)
    last, width = cut[-1], math.prod(holding.whole[cut[-1] + 1 :])
    if cut[:-1] not in ([], [0]) or (cut[:-1] and len(holding.parts[0]) > 1):
        raise ValueError(f"{holding} is cut in a way whose places have no formula")
    ranges = [each for each in holding.parts[last] if each.size]
    stride = holding.whole[last] * width
    origin = ranges[0].start * width + (holding.parts[0][0].start * _inner(holding) if last else 0)
    period, gaps = 0, []
    for before, each in pairwise((Range(ranges[0].start, ranges[0].start), *ranges)):
        if each.start != before.stop:
            gaps.append(Gap(period, (each.start - before.stop) * width))
        period += each.size * width
    rows = math.prod(holding.shape[:last])
    if not gaps and rows == 1:
        return Places(origin + start)
    if period > MOST_PERIOD:
        raise ValueError(f"{period:,} elements with gaps are more than {MOST_PERIOD:,}")
    return Places(origin, start, period, stride, tuple(gaps))


def _inner(holding: Holding) -> int:
    """Return how many elements a place along the first axis has."""
    return math.prod(holding.whole[1:])
