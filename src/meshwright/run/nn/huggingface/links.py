"""How a parameter of ours lies in the tensors of a Hugging Face checkpoint, said once.

A `Link` names a tensor of theirs and gives two views, one of our parameter and one of their
tensor, that hold the same numbers in the same order. Loading copies one view into the other,
saving copies the other way; there is no second description to disagree with the first.

An entry of a family's table makes the links of one parameter, from its shape and what the model
says of its layer. Entries nest: `PerExpert(Joined(…))`. A `%` in a name stands for the expert.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from meshwright.spec.model import Block, Model

Shape = tuple[int, ...]
View = Callable[[Tensor], Tensor]


class Link(NamedTuple):
    """One stretch of numbers that both sides have."""

    theirs: str
    """Name of their tensor."""
    shape: Shape
    """Shape of their whole tensor."""
    in_ours: View
    """The stretch within our parameter."""
    in_theirs: View
    """The same stretch within their tensor."""


class Site(NamedTuple):
    """Where a parameter of ours stands: entries read sizes from it."""

    model: Model
    block: Block | None
    """The layer's block; None outside the layers."""


class Entry(Protocol):
    """One line of a family's table."""

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Make the links of a parameter of `shape`."""
        ...


Sizes = Callable[[Site], Sequence[int]]
"""Widths that depend on the model, such as those of queries, keys and values."""


def whole(tensor: Tensor) -> Tensor:
    """View all of a tensor."""
    return tensor


def _rows(start: int, length: int) -> View:
    return lambda tensor: tensor.narrow(0, start, length)


class Same(NamedTuple):
    """Their tensor is our parameter."""

    name: str

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link the two as they are."""
        del site
        yield Link(self.name, shape, whole, whole)


class Reshaped(NamedTuple):
    """Their tensor has an axis of one more, such as a convolution's `[channels, 1, taps]`."""

    name: str
    axis: int = 1

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link the two with the axis put in where ours has two."""
        del site
        axis = self.axis
        if len(shape) < 2:
            yield Link(self.name, shape, whole, whole)
            return
        theirs = (*shape[:axis], 1, *shape[axis:])
        yield Link(self.name, theirs, whole, lambda tensor: tensor.squeeze(axis))


class Chosen(NamedTuple):
    """Their names depend on the layer's kind."""

    choose: Callable[[Site], Entry]

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link by the entry chosen for the place."""
        return self.choose(site).links(shape, site)


class Turned(NamedTuple):
    """A matrix is stored the other way round, `[in, out]` where ours is `[out, in]`.

    Turns the last two axes before the entry within sees them, so that parts are cut from the
    same side as ever; whatever has fewer axes stays.
    """

    within: Entry

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link through a turned view of ours."""
        if len(shape) < 2:
            yield from self.within.links(shape, site)
            return
        turned = (*shape[:-2], shape[-1], shape[-2])
        for link in self.within.links(turned, site):
            yield link._replace(in_ours=_after(link.in_ours, _turn))


def _turn(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)


def _after(outer: View, inner: View) -> View:
    return lambda tensor: outer(inner(tensor))


class Joined(NamedTuple):
    """Ours stacks several of theirs along the first axis, such as queries, keys and values."""

    parts: tuple[Entry, ...]
    sizes: Sizes | None = None
    """How many rows each has; equally many where it is None."""

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link each part to its rows of ours."""
        count = len(self.parts)
        sizes = [shape[0] // count] * count if self.sizes is None else self.sizes(site)
        start = 0
        for part, size in zip(self.parts, sizes, strict=True):
            for link in part.links((size, *shape[1:]), site):
                yield link._replace(in_ours=_after(link.in_ours, _rows(start, size)))
            start += size


class Grouped(NamedTuple):
    """Theirs deals out rows group by group where ours keeps each kind of row together.

    Ours is `[kind 1 of all groups | kind 2 of all groups | …]`, theirs is
    `[group 1: kind 1, kind 2, … | group 2: …]`: a head's query beside its key and value.
    """

    name: str
    sizes: Sizes
    """The number of groups, then the rows of each kind in one group."""
    axis: int = 0

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link each kind's rows of ours to theirs."""
        groups, *sizes = self.sizes(site)
        axis = self.axis % len(shape)
        start = 0
        for size in sizes:
            yield Link(
                self.name,
                shape,
                _kind(axis, groups, groups * start, size),
                _dealt(axis, groups, start, size),
            )
            start += size


def _kind(axis: int, groups: int, start: int, size: int) -> View:
    return lambda tensor: tensor.narrow(axis, start, groups * size).unflatten(axis, (groups, size))


def _dealt(axis: int, groups: int, start: int, size: int) -> View:
    return lambda tensor: tensor.unflatten(axis, (groups, -1)).narrow(axis + 1, start, size)


class Dealt(NamedTuple):
    """One kind of row of a tensor that theirs deals out group by group; ours has it alone."""

    name: str
    sizes: Sizes
    """The number of groups, then the rows of each kind in one group."""
    kind: int

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link the kind's rows."""
        groups, *sizes = self.sizes(site)
        size, start = sizes[self.kind], sum(sizes[: self.kind])
        theirs = (groups * sum(sizes), *shape[1:])
        in_ours, in_theirs = _kind(0, groups, 0, size), _dealt(0, groups, start, size)
        yield Link(self.name, theirs, in_ours, in_theirs)


class Swapped(NamedTuple):
    """Both deal out two kinds of row group by group, theirs the other one first."""

    name: str
    sizes: Sizes
    """The number of groups, then a group's rows of theirs' first kind and of its second."""

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link each kind's rows."""
        groups, first, second = self.sizes(site)
        ours = _dealt(0, groups, second, first), _dealt(0, groups, 0, second)
        theirs = _dealt(0, groups, 0, first), _dealt(0, groups, first, second)
        for in_ours, in_theirs in zip(ours, theirs, strict=True):
            yield Link(self.name, shape, in_ours, in_theirs)


class PerExpert(NamedTuple):
    """Ours stacks all experts on its first axis, theirs has a tensor for each (`%` in the name)."""

    within: Entry

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link every expert's tensor to its slice of ours."""
        for expert in range(shape[0]):
            for link in self.within.links(shape[1:], site):
                yield link._replace(
                    theirs=link.theirs.replace("%", str(expert)),
                    in_ours=_after(link.in_ours, _expert(expert)),
                )


def _expert(index: int) -> View:
    return lambda tensor: tensor[index]


class ExpertsInRows(NamedTuple):
    """Ours stacks all experts on its first axis, theirs puts one's rows below another's."""

    within: Entry

    def links(self, shape: Shape, site: Site) -> Iterator[Link]:
        """Link every expert's rows to its slice of ours."""
        for expert in range(shape[0]):
            for link in self.within.links(shape[1:], site):
                rows = link.shape[0]
                yield link._replace(
                    shape=(shape[0] * rows, *link.shape[1:]),
                    in_ours=_after(link.in_ours, _expert(expert)),
                    in_theirs=_after(link.in_theirs, _rows(expert * rows, rows)),
                )
