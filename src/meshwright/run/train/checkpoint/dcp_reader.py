"""`CheckpointReader`: torch's distributed checkpoint reads our folders through it.

Torch's load planner works out which box of which saved chunk lands where, and `read_items` reads
it. Our own loads need neither (see `loading`); this is for programs that know only torch. It runs
no code from the disk.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.run.train.checkpoint.checkpoint_folder import read_metadata
from meshwright.run.train.checkpoint.metadata import CheckpointMetadata
from meshwright.run.train.checkpoint.read_items import ChunkLocation, ReadItem, read_items
from meshwright.run.train.checkpoint.safetensors_layout import TORCH_DTYPES


class CheckpointReader(StorageReader):
    """Reads one checkpoint: `dcp.load(tensors, storage_reader=CheckpointReader(path))`."""

    def __init__(
        self, path: Path, record: CheckpointMetadata | None = None, *, threads: int = 4
    ) -> None:
        self._path = Path(path)
        self._record = record
        self._threads = threads
        self._places: dict[MetadataIndex, ChunkLocation] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on, where one is named."""
        if checkpoint_id is not None:
            self._path, self._record = Path(checkpoint_id), None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the saved tensors as the planner wants to know them."""
        record = self._record or read_metadata(self._path)
        places: dict[MetadataIndex, ChunkLocation] = {}
        known: dict[str, Any] = {}
        for name, tensor in record.tensors.items():
            dtype = TORCH_DTYPES[tensor.dtype]
            for chunk in tensor.chunks:
                file = record.files[chunk.file].name
                place = ChunkLocation(file, chunk.start, chunk.sizes, dtype)
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
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        reads = [
            ReadItem(
                self._places[item.storage_index],
                TensorBox(tuple(item.storage_offsets), tuple(item.lengths)),
                target,
            )
            for item, target in zip(plan.items, targets, strict=True)
        ]
        read_items(self._path, reads, self._threads)
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is the path of a folder."""
        return Path(checkpoint_id).is_dir()
