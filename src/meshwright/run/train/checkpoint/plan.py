"""`Planner`: who writes which part of which tensor, decided by torch's distributed checkpoint.

Tensors that every rank holds are dealt out evenly, and sharded ones are written where they lie
(`DefaultSavePlanner`). The plan is made before anything is copied, so a rank copies only what it
writes. It is kept, and made anew only when some rank's names, shapes, types or placements change.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError, Problem
from meshwright.run.train.checkpoint.image import Box, FileImage, dtype_name, lay_out
from meshwright.run.train.checkpoint.peers import Peers
from meshwright.run.train.checkpoint.record import SavedChunk, SavedTensor


class Planned(NamedTuple):
    """What this rank writes, and on the first rank, what all write together."""

    image: FileImage
    items: tuple[WriteItem, ...]
    """One for each box of the image."""
    ranks: tuple[int, ...]
    """Ranks that write a file, in order; only known to the first."""
    tensors: dict[str, SavedTensor]
    """Where everything goes; only known to the first."""


class Planner:
    """Plans saves, remembering the last plan."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._seen: tuple[object, ...] = ()
        self._planned: Planned | None = None

    def plan(
        self, tensors: Mapping[str, torch.Tensor], problems: Sequence[Problem] = ()
    ) -> Planned:
        """Decide what each rank writes; all ranks call it together.

        Problems that some rank already found, or finds here, are raised on every rank.
        """
        self._planner.set_up_planner(dict(tensors), None, self._peers.first)
        seen = tuple(_placement(name, tensor) for name, tensor in tensors.items())
        known = self._planned if seen == self._seen else None
        mine = [*problems, *(_problems(tensors) if known is None else ())]
        changed, wrong = self._peers.combine(
            lambda: (known is None, mine),
            lambda ranks: (any(new for new, _ in ranks), [p for _, group in ranks for p in group]),
        )
        if wrong:
            raise InputError(dict.fromkeys(wrong))
        if known is not None and not changed:
            return known
        self._planned, self._seen = self._fresh(), seen
        return self._planned

    def local(self, item: WriteItem) -> torch.Tensor:
        """Return the part of this rank's tensor that an item names."""
        tensor = self._planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _fresh(self) -> Planned:
        everyone: list[SavePlan] = []

        def decide(plans: list[SavePlan]) -> list[SavePlan]:
            decided, _ = self._planner.create_global_plan(plans)
            everyone[:] = decided
            return decided

        mine = self._planner.finish_plan(self._peers.deal(self._planner.create_local_plan, decide))
        items = {_box(item): item for item in mine.items}
        image = lay_out(self._peers.rank, items)
        ranks, tensors = _index(everyone)
        return Planned(image, tuple(items[box] for box in image.boxes), ranks, tensors)


def _problems(tensors: Mapping[str, object]) -> list[Problem]:
    problems = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            what, fix = f"a {type(tensor).__name__} is no tensor", "put it into `extra`"
            problems.append(Problem(name, what, fix))
        elif tensor.is_meta:
            problems.append(Problem(name, "it is on `meta` and has no data", "materialise it"))
        else:
            try:
                dtype_name(tensor.dtype, name)
            except InputError as error:
                problems += error.problems
    return problems


def _placement(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """Name everything of a tensor that its plan depends on."""
    if isinstance(tensor, DTensor):
        return name, tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    return name, getattr(tensor, "shape", None), getattr(tensor, "dtype", None)


def _box(item: WriteItem) -> Box:
    data = item.tensor_data
    assert data is not None
    return Box(
        tensor=item.index.fqn,
        dtype=dtype_name(data.properties.dtype, item.index.fqn),
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def _index(plans: list[SavePlan]) -> tuple[tuple[int, ...], dict[str, SavedTensor]]:
    """Find every box of every rank in the files that they will write."""
    writers = tuple(rank for rank, plan in enumerate(plans) if plan.items)
    tensors: dict[str, SavedTensor] = {}
    chunks: dict[str, list[SavedChunk]] = {}
    for file, rank in enumerate(writers):
        image = lay_out(rank, map(_box, plans[rank].items))
        for box, start in zip(image.boxes, image.starts, strict=True):
            chunk = SavedChunk(offsets=box.offsets, sizes=box.sizes, file=file, start=start)
            chunks.setdefault(box.tensor, []).append(chunk)
            tensors[box.tensor] = SavedTensor(dtype=box.dtype, shape=box.shape, chunks=())
    return writers, {
        name: SavedTensor(dtype=one.dtype, shape=one.shape, chunks=tuple(chunks[name]))
        for name, one in tensors.items()
    }
