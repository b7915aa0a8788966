"""8-bit moments under another layout: decoded by the scales of the save, coded by blocks of here.

A scale is for 256 elements that follow one another in what a rank holds. Where a rank of the save
held others, its scales were saved together with the boxes of the whole that its elements are, in
their order; from these the block of any element is found. Codes that keep their company keep their
bits; `block_quantization.requantize_blocks` says how far others move. Host memory is taken for one
tensor at a time: 12 bytes for each of its elements here, and 40 for those of a stretch.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.policy.resharding.tensor_box import TensorBox, intersect_boxes, split_disjoint
from meshwright.run.kernels.optimizer.block_quantization import BLOCK_ELEMENTS, requantize_blocks
from meshwright.run.nn.sharding.sharded_tensor import BlockScales, ShardedTensor
from meshwright.run.train.checkpoint.metadata import CheckpointMetadata
from meshwright.run.train.checkpoint.read_items import ChunkLocation, ReadItem, read_items
from meshwright.run.train.checkpoint.safetensors_layout import TORCH_DTYPES
from meshwright.run.train.checkpoint.savable_tensors import (
    KEY_SEPARATOR,
    ORDER_PREFIX,
    SavableTensors,
    make_scale_key,
)

_STRETCH = 2**14 * BLOCK_ELEMENTS
"""Elements that are coded at a time."""


class ScaleSource(NamedTuple):
    """Scales of the save, and the boxes whose elements, one after the other, they are for."""

    name: str
    boxes: tuple[TensorBox, ...]


class Requantization(NamedTuple):
    """Codes of this rank whose blocks are not those of the save."""

    name: str
    """Under which the scales are asked for."""
    scales: BlockScales
    codes: ShardedTensor
    scale_sources: tuple[ScaleSource, ...]


def plan_requantization(
    record: CheckpointMetadata,
    folder: Path,
    into: SavableTensors,
    placed: Mapping[str, ShardedTensor],
) -> list[Requantization]:
    """Return what of a load has to be coded anew, as far as the save tells how it was coded."""
    saved: dict[str, list[str]] = {}
    for name in record.tensors:
        saved.setdefault(name.partition(KEY_SEPARATOR)[0], []).append(name)
    orders: dict[str, tuple[TensorBox, ...]] = {}
    found = []
    for name, scales in into.items():
        if not isinstance(scales, BlockScales) or make_scale_key(name, scales) in record.tensors:
            continue
        codes = placed.get(scales.codes_name)
        if codes is None or scales.codes_name not in record.tensors:
            continue
        sources = []
        for each in saved.get(name, []):
            mark = each.partition(KEY_SEPARATOR)[2]
            if mark not in orders:
                orders[mark] = _order(record, folder, mark)
            boxes = (
                orders[mark]
                if mark
                else (TensorBox((0,) * len(codes.global_shape), codes.global_shape),)
            )
            if any(True for _ in _shared(codes, boxes)):
                sources.append(ScaleSource(each, boxes))
        if _covered(codes, sources):
            found.append(
                Requantization(make_scale_key(name, scales), scales, codes, tuple(sources))
            )
    return found


def requantize(
    record: CheckpointMetadata, folder: Path, each: Requantization, threads: int
) -> None:
    """Code a tensor anew, after its codes were read as they were saved."""
    rows = {
        source.name: torch.empty(record.tensors[source.name].shape) for source in each.scale_sources
    }
    reads = (read for name, row in rows.items() for read in _reads(record, name, row))
    read_items(folder, list(reads), threads)
    scales, first = torch.cat(list(rows.values())), 0
    codes = each.codes.tensor.detach()
    blocks = torch.empty(codes.shape, dtype=torch.int64)
    at = ShardedTensor(blocks, each.codes.global_shape, each.codes.chunks)
    for source in each.scale_sources:
        for part, inside, numbers in _shared(each.codes, source.boxes):
            target = at.view_chunk(each.codes.chunks[part])[inside]
            target.copy_(numbers.of(target.shape) // BLOCK_ELEMENTS + first)
        first += rows[source.name].numel()
    flat, numbered, made = codes.view(-1), blocks.view(-1).int(), each.scales.tensor.detach()
    for begin in range(0, flat.numel(), _STRETCH):
        some = slice(begin, begin + _STRETCH)
        fresh, fresh_scales = requantize_blocks(flat[some].cpu(), scales, numbered[some])
        flat[some].copy_(fresh)
        first = begin // BLOCK_ELEMENTS
        made[first : first + len(fresh_scales)].copy_(fresh_scales)


class _Numbers(NamedTuple):
    """The numbers of a box's elements among those of a rank of the save."""

    first: int
    strides: tuple[int, ...]

    def of(self, shape: torch.Size) -> torch.Tensor:
        found = torch.full((1,) * len(shape), self.first)
        for axis, (size, stride) in enumerate(zip(shape, self.strides, strict=True)):
            line = torch.arange(size) * stride
            found = found + line.view(-1, *(1,) * (len(shape) - axis - 1))
        return found


def _shared(
    codes: ShardedTensor, boxes: tuple[TensorBox, ...]
) -> Iterator[tuple[int, tuple[slice, ...], _Numbers]]:
    """Yield what parts of a tensor have of boxes: part, cut of it, numbers of its elements."""
    before = 0
    for box in boxes:
        strides = tuple(math.prod(box.sizes[axis + 1 :]) for axis in range(len(box.sizes)))
        for number, part in enumerate(codes.chunks):
            whole = TensorBox(part.offsets, part.sizes)
            both = intersect_boxes(whole, box)
            if both is not None:
                ahead = zip(both.offsets, box.offsets, strides, strict=True)
                first = before + sum((mine - its) * stride for mine, its, stride in ahead)
                yield number, both.slice_in(whole), _Numbers(first, strides)
        before += box.num_elements


def _covered(codes: ShardedTensor, sources: list[ScaleSource]) -> bool:
    """Tell whether every element has a scale."""
    parts = [TensorBox(part.offsets, part.sizes) for part in codes.chunks]
    both = (
        intersect_boxes(mine, box) for source in sources for box in source.boxes for mine in parts
    )
    found = sum(
        piece.num_elements for piece, _ in split_disjoint(each for each in both if each is not None)
    )
    return found == sum(each.num_elements for each in parts)


def _order(record: CheckpointMetadata, folder: Path, mark: str) -> tuple[TensorBox, ...]:
    """Read the boxes that a mark stands for; none where the save did not write them."""
    name = f"{ORDER_PREFIX}{mark}"
    if name not in record.tensors:
        return ()
    rows = torch.empty(record.tensors[name].shape, dtype=torch.int64)
    read_items(folder, list(_reads(record, name, rows)), threads=1)
    return tuple(TensorBox(tuple(offsets), tuple(sizes)) for offsets, sizes in rows.tolist())


def _reads(record: CheckpointMetadata, name: str, into: torch.Tensor) -> Iterator[ReadItem]:
    """Return what brings a whole saved tensor into memory."""
    saved = record.tensors[name]
    for chunk in saved.chunks:
        if math.prod(chunk.sizes):
            file = record.files[chunk.file].name
            place = ChunkLocation(file, chunk.start, chunk.sizes, TORCH_DTYPES[saved.dtype])
            whole = TensorBox((0,) * len(chunk.sizes), chunk.sizes)
            cut = TensorBox(chunk.offsets, chunk.sizes).slice_in(
                TensorBox((0,) * len(saved.shape), saved.shape)
            )
            yield ReadItem(place, whole, into[cut])
