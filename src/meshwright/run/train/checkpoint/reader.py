"""`CheckpointReader`: torch's distributed checkpoint reads our folders through it.

The load planner works out which box of which saved chunk lands where, so what any number of ranks
saved loads on any other number. The reader fetches those boxes: straight into a tensor on the
host where the bytes lie in the same order, else through a buffer. It runs no code from the disk.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from meshwright.errors import DamagedFile, Problem
from meshwright.run.train.checkpoint.folder import read_record
from meshwright.run.train.checkpoint.image import TORCH_DTYPES
from meshwright.run.train.checkpoint.record import Record
from meshwright.run.train.checkpoint.staging import bytes_of

_READ_BYTES = 16 * 2**20
"""Most that one buffer holds, unless a single row is longer."""


class _Place(NamedTuple):
    """Where a saved chunk lies."""

    file: str
    start: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class CheckpointReader(StorageReader):
    """Reads one checkpoint: `dcp.load(tensors, storage_reader=CheckpointReader(path))`."""

    def __init__(self, path: Path, record: Record | None = None, *, threads: int = 4) -> None:
        self._path = Path(path)
        self._record = record
        self._threads = threads
        self._places: dict[MetadataIndex, _Place] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on, where one is named."""
        if checkpoint_id is not None:
            self._path, self._record = Path(checkpoint_id), None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the saved tensors as the planner wants to know them."""
        record = self._record or read_record(self._path)
        places: dict[MetadataIndex, _Place] = {}
        known: dict[str, Any] = {}
        for name, tensor in record.tensors.items():
            dtype = TORCH_DTYPES[tensor.dtype]
            for chunk in tensor.chunks:
                file = record.files[chunk.file].name
                place = _Place(file, chunk.start, chunk.sizes, dtype)
                places[MetadataIndex(name, chunk.offsets)] = place
            known[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
        return Metadata(state_dict_metadata=known, storage_data=places)

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002 - all ranks read alike
        *_: Any,
        **__: Any,
    ) -> None:
        """Take the places that `read_metadata` found."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item into its tensor."""
        with ExitStack() as stack:
            opened: dict[str, int] = {}
            for item in plan.items:
                name = self._places[item.storage_index].file
                if name not in opened:
                    opened[name] = os.open(self._path / name, os.O_RDONLY)
                    stack.callback(os.close, opened[name])

            def fetch(item: ReadItem) -> None:
                place = self._places[item.storage_index]
                target = planner.resolve_tensor(item).detach()
                _read_box(opened[place.file], self._path, place, item, target)
                planner.commit_tensor(item, target)

            with ThreadPoolExecutor(self._threads) as pool:
                for _ in pool.map(fetch, plan.items):
                    pass
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is the path of a folder."""
        return Path(checkpoint_id).is_dir()


def _read_box(file: int, folder: Path, place: _Place, item: ReadItem, target: torch.Tensor) -> None:
    """Copy a box of a saved chunk into a tensor of the box's shape."""
    sizes, offsets, lengths = place.sizes, tuple(item.storage_offsets), tuple(item.lengths)
    if not sizes:  # a scalar is a row of one
        sizes, offsets, lengths, target = (1,), (0,), (1,), target.reshape(1)
    row_bytes = math.prod(sizes[1:]) * place.dtype.itemsize
    first = place.start + offsets[0] * row_bytes
    where = folder / place.file
    if lengths[1:] == sizes[1:] and _lies_in_order(target, place.dtype):
        _read(file, target.reshape(-1).view(torch.uint8), first, where)
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
    view = bytes_of(memory)
    while view:
        done = os.preadv(file, [view], start)
        if not done:
            what = f"it ends at byte {start:,}, inside a tensor"
            raise DamagedFile([Problem(str(where), what, "use another checkpoint")])
        view, start = view[done:], start + done
