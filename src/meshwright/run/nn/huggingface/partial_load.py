"""A rank's part of a parameter, put together from the few tensors of theirs that touch it.

The rows of a parameter fall into pieces that different tensors of theirs fill: queries, keys and
values, or one expert after the other. Pieces of which a rank holds nothing are not read; the others
are made whole one at a time, and what is held is taken from each.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.huggingface.tensor_mapping import TensorMapping
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardBox, ShardSpec

ReadTensorFn = Callable[[str, torch.device], Tensor]


class CheckpointTensor(NamedTuple):
    """A tensor of theirs under its name in the files, and how it fills a parameter."""

    name: str
    tensor_mapping: TensorMapping


class RowBlock(NamedTuple):
    """Rows of a whole parameter that some tensors of theirs fill."""

    rows: IndexRange
    global_shape: tuple[int, ...]
    """Shape of the parameter."""
    boxes: list[ShardBox]
    """What the rank holds."""
    checkpoint_tensors: list[CheckpointTensor]

    def load_into(self, parameter: Tensor, read: ReadTensorFn) -> None:
        """Read the piece and copy what is held of it into the rank's parameter."""
        made = self._read(parameter, read)
        if not self.global_shape:
            parameter.copy_(made)
            return
        for whole, local in self.boxes:
            first = max(whole[0].start, self.rows.start)
            last = min(whole[0].stop, self.rows.stop)
            if first >= last:
                continue
            at = local[0].start + first - whole[0].start
            target = parameter[(slice(at, at + last - first), *_slices(local[1:]))]
            rows = slice(first - self.rows.start, last - self.rows.start)
            target.copy_(made[(rows, *_slices(whole[1:]))])

    def _read(self, parameter: Tensor, read: ReadTensorFn) -> Tensor:
        made = parameter.new_empty(
            (self.rows.size, *self.global_shape[1:]) if self.global_shape else ()
        )
        for name, link in self.checkpoint_tensors:
            # The same view as of the whole, moved to where this piece begins.
            view = _view(link, self.global_shape)
            start = view.storage_offset() - self.rows.start * _width(self.global_shape)
            target = made.as_strided(view.shape, view.stride(), start)
            target.copy_(link.view_checkpoint(read(name, parameter.device)))
        return made


def iter_needed_blocks(
    holding: ShardSpec, sources: Sequence[CheckpointTensor]
) -> Iterator[RowBlock]:
    """Yield the pieces of a parameter of which a rank holds something."""
    boxes = holding.list_boxes()
    grouped: list[tuple[IndexRange, list[CheckpointTensor]]] = []
    for rows, source in sorted(
        ((_rows(each.tensor_mapping, holding.global_shape), each) for each in sources),
        key=lambda pair: pair[0],
    ):
        if grouped and rows.start < grouped[-1][0].stop:
            before, joined = grouped[-1]
            grouped[-1] = (IndexRange(before.start, max(before.stop, rows.stop)), [*joined, source])
        else:
            grouped.append((rows, [source]))
    for rows, joined in grouped:
        if any(_touch(rows, box) for box in boxes):
            yield RowBlock(rows, holding.global_shape, boxes, joined)


def _touch(rows: IndexRange, box: ShardBox) -> bool:
    return not box.global_ranges or (
        box.global_ranges[0].start < rows.stop and rows.start < box.global_ranges[0].stop
    )


def _rows(link: TensorMapping, whole: tuple[int, ...]) -> IndexRange:
    """Return the rows of a parameter that a link touches, from the first to the last."""
    view = _view(link, whole)
    reach = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    first = view.storage_offset()
    return IndexRange(first // _width(whole), (first + reach) // _width(whole) + 1)


def _view(link: TensorMapping, whole: tuple[int, ...]) -> Tensor:
    """Return the view of a whole parameter that a link fills, without memory."""
    return link.view_parameter(torch.empty(whole, device="meta"))


def _width(whole: tuple[int, ...]) -> int:
    return torch.Size(whole[1:]).numel()


def _slices(ranges: Sequence[IndexRange]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in ranges)
