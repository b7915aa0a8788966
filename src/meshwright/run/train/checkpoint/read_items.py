"""`read_items`: read boxes of saved chunks into tensors, directly where bytes are in order."""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.errors import DamagedFile, Problem
from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.run.train.checkpoint.staging import view_as_memoryview

_READ_BYTES = 16 * 2**20
"""Most that one buffer holds, unless a single row is longer."""


class ChunkLocation(NamedTuple):
    """Where a saved chunk lies."""

    file: str
    start: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class ReadItem(NamedTuple):
    """A box of a chunk, and the tensor of the box's shape it goes to."""

    location: ChunkLocation
    box: TensorBox
    """Within the chunk."""
    target: torch.Tensor


def read_items(folder: Path, reads: Sequence[ReadItem], threads: int) -> None:
    """Read every box into its tensor."""
    with ExitStack() as stack:
        opened: dict[str, int] = {}
        for name in dict.fromkeys(read.location.file for read in reads):
            opened[name] = os.open(folder / name, os.O_RDONLY)
            stack.callback(os.close, opened[name])
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(
                lambda read: _read_box(opened[read.location.file], folder, read), reads
            ):
                pass


def _read_box(file: int, folder: Path, read: ReadItem) -> None:
    place, (offsets, lengths), target = read
    sizes = place.sizes
    if not sizes:  # a scalar is a row of one
        sizes, offsets, lengths, target = (1,), (0,), (1,), target.reshape(1)
    row_bytes = math.prod(sizes[1:]) * place.dtype.itemsize
    first = place.start + offsets[0] * row_bytes
    where = folder / place.file
    if lengths[1:] == sizes[1:] and _lies_in_order(target, place.dtype):
        _read(file, target.reshape(-1).view(torch.uint8), first, where)
        return
    if len(sizes) > 1 and row_bytes > _READ_BYTES:  # such as one expert's matrix: row by row of it
        for row in range(lengths[0]):
            inner = ChunkLocation(place.file, first + row * row_bytes, sizes[1:], place.dtype)
            _read_box(
                file, folder, ReadItem(inner, TensorBox(offsets[1:], lengths[1:]), target[row])
            )
        return
    rows = max(1, _READ_BYTES // max(row_bytes, 1))
    pinned = target.is_cuda
    memory = torch.empty(min(rows, lengths[0]) * row_bytes, dtype=torch.uint8, pin_memory=pinned)
    columns = tuple(
        slice(start, start + length) for start, length in zip(offsets, lengths, strict=True)
    )[1:]
    for row in range(0, lengths[0], rows):
        count = min(rows, lengths[0] - row)
        part = memory[: count * row_bytes]
        _read(file, part, first + row * row_bytes, where)
        box = part.view(place.dtype).reshape(count, *sizes[1:])[(slice(None), *columns)]
        target[row : row + count].copy_(box)


def _lies_in_order(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype


def _read(file: int, memory: torch.Tensor, start: int, where: Path) -> None:
    view = view_as_memoryview(memory)
    while view:
        done = os.preadv(file, [view], start)
        if not done:
            what = f"it ends at byte {start:,}, inside a tensor"
            raise DamagedFile([Problem(str(where), what, "use another checkpoint")])
        view, start = view[done:], start + done
