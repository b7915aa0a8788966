"""What a load asks of a checkpoint: whether they fit, and which box of which chunk goes where.

Ranks of a pipeline ask for different tensors, and ranks that share one for different parts of it:
whether everything saved is asked for can be told only from what all of them ask for.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from meshwright.errors import Problem
from meshwright.policy.resharding.tensor_box import TensorBox, intersect_boxes, split_disjoint
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.train.checkpoint.metadata import CheckpointMetadata
from meshwright.run.train.checkpoint.rank_coordinator import RankCoordinator
from meshwright.run.train.checkpoint.read_items import ChunkLocation, ReadItem
from meshwright.run.train.checkpoint.requantization import Requantization
from meshwright.run.train.checkpoint.safetensors_layout import TORCH_DTYPES
from meshwright.run.train.checkpoint.savable_tensors import KEY_SEPARATOR, ORDER_PREFIX
from meshwright.run.train.checkpoint.write_assignment import find_coverage_problems

RequestedBoxes = dict[str, tuple[TensorBox, ...]]
"""The boxes that a rank asks for, by the names of tensors."""

_BLOCKS = Problem(
    "8-bit moments",
    "they were saved under another layout, by a version that did not note what shares a scale",
    "load under the layout of the save, and save anew",
)


def find_load_plan_problems(
    record: CheckpointMetadata,
    placed: Mapping[str, ShardedTensor],
    anew: Sequence[Requantization],
    everything: bool,
    peers: RankCoordinator,
) -> list[Problem]:
    """Say what of all ranks' tensors does not fit; with `everything`, also what nobody asks for.

    `anew` has the codes whose scales are made here, of those saved.
    """

    def mine() -> tuple[list[Problem], RequestedBoxes]:
        asked: RequestedBoxes = {}
        for name, each in placed.items() if everything else ():
            saved = record.tensors.get(name)
            if saved is not None and saved.shape == each.global_shape:
                asked[name] = tuple(TensorBox(part.offsets, part.sizes) for part in each.chunks)
            elif saved is not None:  # told already, once
                asked[name] = (TensorBox((0,) * len(saved.shape), saved.shape),)
        for source in (
            (source for each in anew for source in each.scale_sources) if everything else ()
        ):
            shape = record.tensors[source.name].shape
            asked[source.name] = (TensorBox((0,) * len(shape), shape),)
        return list(_misfits(record, placed)), asked

    def together(ranks: list[tuple[list[Problem], RequestedBoxes]]) -> list[Problem]:
        problems = dict.fromkeys(problem for found, _ in ranks for problem in found)
        if everything:
            left = _left(record, [asked for _, asked in ranks])
            # Scales of another layout are left over wherever those of this one are missing.
            problems |= dict.fromkeys(
                problem
                for problem in left
                if not (_BLOCKS in problems and KEY_SEPARATOR in problem.where)
            )
        return list(problems)

    return peers.all_reduce(mine, together)


def _misfits(record: CheckpointMetadata, placed: Mapping[str, ShardedTensor]) -> Iterator[Problem]:
    """Say which of a rank's tensors cannot be loaded as they are."""
    marked = {name.partition(KEY_SEPARATOR)[0] for name in record.tensors if KEY_SEPARATOR in name}
    for name, each in placed.items():
        saved = record.tensors.get(name)
        if saved is None:
            plain, mark, _ = name.partition(KEY_SEPARATOR)
            if plain in marked or (mark and plain in record.tensors):
                yield _BLOCKS
            else:
                yield Problem(name, "the checkpoint has no such tensor", "leave it out")
            continue
        if each.tensor.is_meta:
            yield Problem(name, "it is on the meta device", "materialize it")
        if saved.shape != each.global_shape:
            what = f"it was saved as {list(saved.shape)} and is {list(each.global_shape)} here"
            yield Problem(name, what, "load into the model that was saved")
        if TORCH_DTYPES[saved.dtype] != each.tensor.dtype:
            what = f"it was saved as {TORCH_DTYPES[saved.dtype]} and is {each.tensor.dtype} here"
            yield Problem(name, what, "load into its own type and convert it then")


def _left(record: CheckpointMetadata, ranks: list[RequestedBoxes]) -> Iterator[Problem]:
    """Say which tensors, or parts of them, no rank asks for."""
    fix = 'use leftover="ignore"'
    for name, saved in record.tensors.items():
        if name.startswith(ORDER_PREFIX):
            continue
        asking = [asked[name] for asked in ranks if name in asked]
        if not asking:
            yield Problem(name, "it was saved, and nothing asks for it", fix)
            continue
        boxes = {box for each in asking for box in each}
        elements = sum(piece.num_elements for piece, _ in split_disjoint(boxes))
        yield from find_coverage_problems(name, saved.shape, elements, "asked for")


def plan_reads(
    record: CheckpointMetadata, placed: Mapping[str, ShardedTensor]
) -> Iterator[ReadItem]:
    """Return every piece of a chunk that lands in a rank's tensors."""
    for name, each in placed.items():
        saved = record.tensors[name]
        offsets = np.array([chunk.offsets for chunk in saved.chunks], dtype=np.int64)
        ends = offsets + np.array([chunk.sizes for chunk in saved.chunks], dtype=np.int64)
        for part in each.chunks:
            box = TensorBox(part.offsets, part.sizes)
            if not box.num_elements:
                continue
            last = np.add(box.offsets, box.sizes)
            # Checkpoints of many ranks have thousands of chunks, of which few are of use.
            near = np.all((offsets < last) & (ends > box.offsets), axis=1)
            view = each.view_chunk(part)
            for number in np.flatnonzero(near):
                chunk = saved.chunks[number]
                whole = TensorBox(chunk.offsets, chunk.sizes)
                shared = intersect_boxes(box, whole)
                assert shared is not None
                inside = TensorBox(tuple(cut.start for cut in shared.slice_in(whole)), shared.sizes)
                place = ChunkLocation(
                    record.files[chunk.file].name,
                    chunk.start,
                    chunk.sizes,
                    TORCH_DTYPES[saved.dtype],
                )
                yield ReadItem(place, inside, view[shared.slice_in(box)])
