"""`SavePlanner`: who writes which part of which tensor.

The plan is made before anything is copied, so a rank copies only what it writes. It is kept, and
made anew only when some rank's names, shapes, types or places change.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.train.checkpoint.metadata import SavedChunk, SavedTensor
from meshwright.run.train.checkpoint.rank_coordinator import RankCoordinator
from meshwright.run.train.checkpoint.safetensors_layout import (
    SafetensorsLayout,
    WrittenBox,
    get_dtype_name,
    make_safetensors_layout,
)
from meshwright.run.train.checkpoint.savable_tensors import (
    SavableTensors,
    add_scale_layout_tensors,
    find_unsavable_tensors,
)
from meshwright.run.train.checkpoint.write_assignment import Claims, TensorClaim, assign_writes


class WriteItem(NamedTuple):
    """What is copied of a tensor: a cut of one of its parts."""

    name: str
    chunk: int
    slices: tuple[slice, ...]


class SavePlan(NamedTuple):
    """What this rank writes, and on the first rank, what all write together."""

    file_layout: SafetensorsLayout
    write_items: tuple[WriteItem, ...]
    """One for each box of the image."""
    tensors: dict[str, SavedTensor]
    """Where everything goes; only known to the first."""


class SavePlanner:
    """Plans saves, remembering the last plan."""

    def __init__(self, peers: RankCoordinator) -> None:
        self._peers = peers
        self._placed: dict[str, ShardedTensor] = {}
        self._seen: tuple[object, ...] = ()
        self._planned: SavePlan | None = None

    def plan(self, tensors: SavableTensors, problems: Sequence[Problem] = ()) -> SavePlan:
        """Decide what each rank writes; all ranks call it together.

        Problems that some rank already found, or finds here, are raised on every rank.
        """
        mine = [*problems, *find_unsavable_tensors(tensors)]
        self._placed = {} if mine else add_scale_layout_tensors(tensors)
        seen = tuple(
            (name, each.tensor.dtype, each.global_shape, each.chunks)
            for name, each in self._placed.items()
        )
        known = self._planned if seen == self._seen else None
        changed, wrong = self._peers.all_reduce(
            lambda: (known is None, mine),
            lambda ranks: (any(new for new, _ in ranks), [p for _, group in ranks for p in group]),
        )
        if wrong:
            raise InputError(dict.fromkeys(wrong))
        if known is not None and not changed:
            return known
        self._planned = None
        self._planned, self._seen = self._fresh(), seen
        return self._planned

    def get_local_tensor(self, piece: WriteItem) -> torch.Tensor:
        """Return the part of this rank's tensor that a piece names."""
        placed = self._placed[piece.name]
        if piece.chunk < 0:
            return placed.tensor.detach().new_empty(0)
        return placed.view_chunk(placed.chunks[piece.chunk])[piece.slices]

    def release_tensors(self) -> None:
        """Hold no tensor of the last plan any more: their memory may be wanted elsewhere."""
        self._placed = {}

    @property
    def on_gpu(self) -> bool:
        """Whether any tensor of the last plan is on a GPU."""
        return any(each.tensor.is_cuda for each in self._placed.values())

    def _fresh(self) -> SavePlan:
        everyone: list[list[WrittenBox]] = []

        def decide(ranks: list[Claims]) -> list[tuple[list[WrittenBox], list[Problem]]]:
            boxes, problems = assign_writes(ranks)
            everyone[:] = boxes
            return [(each, problems) for each in boxes]

        mine, problems = self._peers.reduce_scatter(lambda: list_local_claims(self._placed), decide)
        if problems:
            raise InputError(problems)
        image = make_safetensors_layout(self._peers.rank, mine)
        pieces = tuple(_piece(box, self._placed[box.tensor]) for box in image.written_boxes)
        return SavePlan(image, pieces, _index(everyone))


def list_local_claims(placed: dict[str, ShardedTensor]) -> Claims:
    """Return what this rank holds, without the numbers."""
    return {
        name: TensorClaim(
            get_dtype_name(each.tensor.dtype, name),
            each.global_shape,
            tuple(TensorBox(part.offsets, part.sizes) for part in each.chunks),
        )
        for name, each in placed.items()
    }


def _piece(box: WrittenBox, placed: ShardedTensor) -> WriteItem:
    """Find a box among a tensor's parts."""
    wanted = TensorBox(box.offsets, box.sizes)
    if not wanted.num_elements:
        return WriteItem(box.tensor, -1, ())
    for number, part in enumerate(placed.chunks):
        whole = TensorBox(part.offsets, part.sizes)
        if whole.contains(wanted):
            return WriteItem(box.tensor, number, wanted.slice_in(whole))
    raise AssertionError(f"{box.key} is not held here")


def _index(ranks: list[list[WrittenBox]]) -> dict[str, SavedTensor]:
    """Find every box of every rank in the files that they will write."""
    tensors: dict[str, SavedTensor] = {}
    chunks: dict[str, list[SavedChunk]] = {}
    writers = [rank for rank, boxes in enumerate(ranks) if boxes]
    for file, rank in enumerate(writers):
        image = make_safetensors_layout(rank, ranks[rank])
        for box, start in zip(image.written_boxes, image.starts, strict=True):
            chunk = SavedChunk(offsets=box.offsets, sizes=box.sizes, file=file, start=start)
            chunks.setdefault(box.tensor, []).append(chunk)
            tensors[box.tensor] = SavedTensor(dtype=box.dtype, shape=box.shape, chunks=())
    return {
        name: SavedTensor(dtype=one.dtype, shape=one.shape, chunks=tuple(chunks[name]))
        for name, one in tensors.items()
    }
