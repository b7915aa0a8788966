"""Boxes of a tensor: what two have in common, what one leaves of another, whether any overlap."""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple


class TensorBox(NamedTuple):
    """A box: where it begins along every axis, and how far it goes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def slice_in(self, outer: "TensorBox") -> tuple[slice, ...]:
        """Return what cuts it out of a box around it."""
        return tuple(
            slice(mine - first, mine - first + size)
            for mine, size, first in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )

    def contains(self, inner: "TensorBox") -> bool:
        """Tell whether another lies inside."""
        return intersect_boxes(self, inner) == inner


def intersect_boxes(one: TensorBox, other: TensorBox) -> TensorBox | None:
    """Return what two boxes have in common; None where that is nothing."""
    offsets, sizes = [], []
    for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        first, last = max(a, b), min(a + m, b + n)
        if first >= last:
            return None
        offsets.append(first)
        sizes.append(last - first)
    return TensorBox(tuple(offsets), tuple(sizes))


def subtract_box(box: TensorBox, taken: TensorBox) -> list[TensorBox]:
    """Return boxes that make up what another leaves of a box."""
    shared = intersect_boxes(box, taken)
    if shared is None:
        return [box]
    left = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for axis, (first, size) in enumerate(zip(shared.offsets, shared.sizes, strict=True)):
        end = offsets[axis] + sizes[axis]
        for start, stop in ((offsets[axis], first), (first + size, end)):
            if start < stop:
                before, behind = slice(axis), slice(axis + 1, None)
                left.append(
                    TensorBox(
                        (*offsets[before], start, *offsets[behind]),
                        (*sizes[before], stop - start, *sizes[behind]),
                    )
                )
        # What is left of the later axes lies inside the common part of this one.
        offsets[axis], sizes[axis] = first, size
    return left


def any_boxes_overlap(boxes: Sequence[TensorBox]) -> bool:
    """Tell whether any two boxes have an element in common."""
    return _tangled([box for box in boxes if box.num_elements])


def _tangled(boxes: Sequence[TensorBox]) -> bool:
    """Part boxes by planes that cut none, as long as there are any; compare what stays together.

    Shards lie in slabs within slabs, so thousands of them are told apart almost by sorting alone.
    """
    if len(boxes) < 2:
        return False
    for axis in range(len(boxes[0].offsets)):
        slabs: list[list[TensorBox]] = []
        end = -1
        for box in sorted(boxes, key=lambda each: each.offsets[axis]):
            if box.offsets[axis] >= end:
                slabs.append([])
            slabs[-1].append(box)
            end = max(end, box.offsets[axis] + box.sizes[axis])
        if len(slabs) > 1:
            return any(_tangled(slab) for slab in slabs if len(slab) > 1)
    return any(intersect_boxes(one, other) is not None for one, other in combinations(boxes, 2))


def split_disjoint(boxes: Iterable[TensorBox]) -> list[tuple[TensorBox, TensorBox]]:
    """Cut boxes so that each element is in one piece only; return each piece with its box."""
    given = sorted(box for box in set(boxes) if box.num_elements)
    if not any_boxes_overlap(given):
        return [(box, box) for box in given]
    pieces: list[tuple[TensorBox, TensorBox]] = []
    for box in given:
        rest = [box]
        for taken, _ in pieces:
            rest = [left for each in rest for left in subtract_box(each, taken)]
        pieces += [(each, box) for each in rest]
    return pieces
