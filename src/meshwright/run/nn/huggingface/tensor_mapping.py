"""How a parameter of ours lies in the tensors of a Hugging Face checkpoint, said once.

A `TensorMapping` names a tensor of theirs and gives two views, one of our parameter and one of
their tensor, that hold the same numbers in the same order. Loading copies one view into the other,
saving copies the other way; there is no second description to disagree with the first.

An entry of a family's table makes the links of one parameter, from its shape and what the model
says of its layer. Entries nest: `PerExpertTensors(StackedTensors(…))`. A `%` in a name stands for
the expert.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from meshwright.spec.model import BlockSpec, Model

Shape = tuple[int, ...]
TensorView = Callable[[Tensor], Tensor]


class TensorMapping(NamedTuple):
    """One stretch of numbers that both sides have."""

    checkpoint_name: str
    """Name of their tensor."""
    shape: Shape
    """Shape of their whole tensor."""
    view_parameter: TensorView
    """The stretch within our parameter."""
    view_checkpoint: TensorView
    """The same stretch within their tensor."""


class ParameterSite(NamedTuple):
    """Where a parameter of ours stands: entries read sizes from it."""

    model: Model
    block: BlockSpec | None
    """The layer's block; None outside the layers."""


class MapEntry(Protocol):
    """One line of a family's table."""

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Make the links of a parameter of `shape`."""
        ...


RowCounts = Callable[[ParameterSite], Sequence[int]]
"""Widths that depend on the model, such as those of queries, keys and values."""


def view_unchanged(tensor: Tensor) -> Tensor:
    """View all of a tensor."""
    return tensor


def _rows(start: int, length: int) -> TensorView:
    return lambda tensor: tensor.narrow(0, start, length)


class SameTensor(NamedTuple):
    """Their tensor is our parameter."""

    name: str

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link the two as they are."""
        del site
        yield TensorMapping(self.name, shape, view_unchanged, view_unchanged)


class UnsqueezedTensor(NamedTuple):
    """Their tensor has an axis of one more, such as a convolution's `[channels, 1, taps]`."""

    name: str
    axis: int = 1

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link the two with the axis put in where ours has two."""
        del site
        axis = self.axis
        if len(shape) < 2:
            yield TensorMapping(self.name, shape, view_unchanged, view_unchanged)
            return
        theirs = (*shape[:axis], 1, *shape[axis:])
        yield TensorMapping(self.name, theirs, view_unchanged, lambda tensor: tensor.squeeze(axis))


class LayerKindEntry(NamedTuple):
    """Their names depend on the layer's kind."""

    select_entry: Callable[[ParameterSite], MapEntry]

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link by the entry chosen for the place."""
        return self.select_entry(site).mappings(shape, site)


class TransposedTensor(NamedTuple):
    """A matrix is stored the other way round, `[in, out]` where ours is `[out, in]`.

    Turns the last two axes before the entry within sees them, so that parts are cut from the
    same side as ever; whatever has fewer axes stays.
    """

    entry: MapEntry

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link through a turned view of ours."""
        if len(shape) < 2:
            yield from self.entry.mappings(shape, site)
            return
        turned = (*shape[:-2], shape[-1], shape[-2])
        for link in self.entry.mappings(turned, site):
            yield link._replace(view_parameter=_after(link.view_parameter, _turn))


def _turn(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)


def _after(outer: TensorView, inner: TensorView) -> TensorView:
    return lambda tensor: outer(inner(tensor))


class StackedTensors(NamedTuple):
    """Ours stacks several of theirs along the first axis, such as queries, keys and values."""

    entries: tuple[MapEntry, ...]
    sizes: RowCounts | None = None
    """How many rows each has; equally many where it is None."""

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link each part to its rows of ours."""
        count = len(self.entries)
        sizes = [shape[0] // count] * count if self.sizes is None else self.sizes(site)
        start = 0
        for part, size in zip(self.entries, sizes, strict=True):
            for link in part.mappings((size, *shape[1:]), site):
                yield link._replace(view_parameter=_after(link.view_parameter, _rows(start, size)))
            start += size


class GroupInterleaved(NamedTuple):
    """Theirs deals out rows group by group where ours keeps each kind of row together.

    Ours is `[kind 1 of all groups | kind 2 of all groups | …]`, theirs is
    `[group 1: kind 1, kind 2, … | group 2: …]`: a head's query beside its key and value.
    """

    name: str
    sizes: RowCounts
    """The number of groups, then the rows of each kind in one group."""
    axis: int = 0

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link each kind's rows of ours to theirs."""
        groups, *sizes = self.sizes(site)
        axis = self.axis % len(shape)
        start = 0
        for size in sizes:
            yield TensorMapping(
                self.name,
                shape,
                _kind(axis, groups, groups * start, size),
                _dealt(axis, groups, start, size),
            )
            start += size


def _kind(axis: int, groups: int, start: int, size: int) -> TensorView:
    return lambda tensor: tensor.narrow(axis, start, groups * size).unflatten(axis, (groups, size))


def _dealt(axis: int, groups: int, start: int, size: int) -> TensorView:
    return lambda tensor: tensor.unflatten(axis, (groups, -1)).narrow(axis + 1, start, size)


class GroupInterleavedPart(NamedTuple):
    """One kind of row of a tensor that theirs deals out group by group; ours has it alone."""

    name: str
    sizes: RowCounts
    """The number of groups, then the rows of each kind in one group."""
    row_kind: int

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link the kind's rows."""
        groups, *sizes = self.sizes(site)
        size, start = sizes[self.row_kind], sum(sizes[: self.row_kind])
        theirs = (groups * sum(sizes), *shape[1:])
        in_ours, in_theirs = _kind(0, groups, 0, size), _dealt(0, groups, start, size)
        yield TensorMapping(self.name, theirs, in_ours, in_theirs)


class SwappedPairs(NamedTuple):
    """Both deal out two kinds of row group by group, theirs the other one first."""

    name: str
    sizes: RowCounts
    """The number of groups, then a group's rows of theirs' first kind and of its second."""

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link each kind's rows."""
        groups, first, second = self.sizes(site)
        ours = _dealt(0, groups, second, first), _dealt(0, groups, 0, second)
        theirs = _dealt(0, groups, 0, first), _dealt(0, groups, first, second)
        for in_ours, in_theirs in zip(ours, theirs, strict=True):
            yield TensorMapping(self.name, shape, in_ours, in_theirs)


class PerExpertTensors(NamedTuple):
    """Ours stacks all experts on its first axis, theirs has a tensor for each (`%` in the name)."""

    entry: MapEntry

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link every expert's tensor to its slice of ours."""
        for expert in range(shape[0]):
            for link in self.entry.mappings(shape[1:], site):
                yield link._replace(
                    checkpoint_name=link.checkpoint_name.replace("%", str(expert)),
                    view_parameter=_after(link.view_parameter, _expert(expert)),
                )


def _expert(index: int) -> TensorView:
    return lambda tensor: tensor[index]


class RowStackedExperts(NamedTuple):
    """Ours stacks all experts on its first axis, theirs puts one's rows below another's."""

    entry: MapEntry

    def mappings(self, shape: Shape, site: ParameterSite) -> Iterator[TensorMapping]:
        """Link every expert's rows to its slice of ours."""
        for expert in range(shape[0]):
            for link in self.entry.mappings(shape[1:], site):
                rows = link.shape[0]
                yield link._replace(
                    shape=(shape[0] * rows, *link.shape[1:]),
                    view_parameter=_after(link.view_parameter, _expert(expert)),
                    view_checkpoint=_after(link.view_checkpoint, _rows(expert * rows, rows)),
                )
