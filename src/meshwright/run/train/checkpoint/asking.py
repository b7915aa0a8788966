"""What a load asks of a checkpoint: whether they fit, and which box of which chunk goes where.

Ranks of a pipeline ask for different tensors, and ranks that share one for different parts of it:
whether everything saved is asked for can be told only from what all of them ask for.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from meshwright.errors import Problem
from meshwright.policy.boxes import Extent, apart, common
from meshwright.run.nn.placed import Placed
from meshwright.run.train.checkpoint.dealing import coverage
from meshwright.run.train.checkpoint.fetch import Place, Read
from meshwright.run.train.checkpoint.given import MARK, ORDER
from meshwright.run.train.checkpoint.image import TORCH_DTYPES
from meshwright.run.train.checkpoint.peers import Peers
from meshwright.run.train.checkpoint.recoding import Recoding
from meshwright.run.train.checkpoint.record import Record

Asked = dict[str, tuple[Extent, ...]]
"""The boxes that a rank asks for, by the names of tensors."""

_BLOCKS = Problem(
    "8-bit moments",
    "they were saved under another layout, by a version that did not note what shares a scale",
    "load under the layout of the save, and save anew",
)


def asked_wrongly(
    record: Record,
    placed: Mapping[str, Placed],
    anew: Sequence[Recoding],
    everything: bool,
    peers: Peers,
) -> list[Problem]:
    """Say what of all ranks' tensors does not fit; with `everything`, also what nobody asks for.

    `anew` has the codes whose scales are made here, of those saved.
    """

    def mine() -> tuple[list[Problem], Asked]:
        asked: Asked = {}
        for name, each in placed.items() if everything else ():
            saved = record.tensors.get(name)
            if saved is not None and saved.shape == each.whole:
                asked[name] = tuple(Extent(part.offsets, part.sizes) for part in each.parts)
            elif saved is not None:  # told already, once
                asked[name] = (Extent((0,) * len(saved.shape), saved.shape),)
        for source in (source for each in anew for source in each.sources) if everything else ():
            shape = record.tensors[source.name].shape
            asked[source.name] = (Extent((0,) * len(shape), shape),)
        return list(_misfits(record, placed)), asked

    def together(ranks: list[tuple[list[Problem], Asked]]) -> list[Problem]:
        problems = dict.fromkeys(problem for found, _ in ranks for problem in found)
        if everything:
            left = _left(record, [asked for _, asked in ranks])
            # Scales of another layout are left over wherever those of this one are missing.
            problems |= dict.fromkeys(
                problem for problem in left if not (_BLOCKS in problems and MARK in problem.where)
            )
        return list(problems)

    return peers.combine(mine, together)


def _misfits(record: Record, placed: Mapping[str, Placed]) -> Iterator[Problem]:
    """Say which of a rank's tensors cannot be loaded as they are."""
    marked = {name.partition(MARK)[0] for name in record.tensors if MARK in name}
    for name, each in placed.items():
        saved = record.tensors.get(name)
        if saved is None:
            plain, mark, _ = name.partition(MARK)
            if plain in marked or (mark and plain in record.tensors):
                yield _BLOCKS
            else:
                yield Problem(name, "the checkpoint has no such tensor", "leave it out")
            continue
        if each.tensor.is_meta:
            yield Problem(name, "it is on `meta` and holds no data", "materialise it")
        if saved.shape != each.whole:
            what = f"it was saved as {list(saved.shape)} and is {list(each.whole)} here"
            yield Problem(name, what, "load into the model that was saved")
        if TORCH_DTYPES[saved.dtype] != each.tensor.dtype:
            what = f"it was saved as {TORCH_DTYPES[saved.dtype]} and is {each.tensor.dtype} here"
            yield Problem(name, what, "load into its own type and convert it then")


def _left(record: Record, ranks: list[Asked]) -> Iterator[Problem]:
    """Say which tensors, or parts of them, no rank asks for."""
    fix = 'use leftover="leave"'
    for name, saved in record.tensors.items():
        if name.startswith(ORDER):
            continue
        asking = [asked[name] for asked in ranks if name in asked]
        if not asking:
            yield Problem(name, "it was saved, and nothing asks for it", fix)
            continue
        boxes = {box for each in asking for box in each}
        elements = sum(piece.elements for piece, _ in apart(boxes))
        yield from coverage(name, saved.shape, elements, "asked for")


def reads_of(record: Record, placed: Mapping[str, Placed]) -> Iterator[Read]:
    """Return every piece of a chunk that lands in a rank's tensors."""
    for name, each in placed.items():
        saved = record.tensors[name]
        offsets = np.array([chunk.offsets for chunk in saved.chunks], dtype=np.int64)
        ends = offsets + np.array([chunk.sizes for chunk in saved.chunks], dtype=np.int64)
        for part in each.parts:
            box = Extent(part.offsets, part.sizes)
            if not box.elements:
                continue
            last = np.add(box.offsets, box.sizes)
            # Checkpoints of many ranks have thousands of chunks, of which few are of use.
            near = np.all((offsets < last) & (ends > box.offsets), axis=1)
            view = each.view(part)
            for number in np.flatnonzero(near):
                chunk = saved.chunks[number]
                whole = Extent(chunk.offsets, chunk.sizes)
                shared = common(box, whole)
                assert shared is not None
                inside = Extent(tuple(cut.start for cut in shared.within(whole)), shared.sizes)
                place = Place(
                    record.files[chunk.file].name,
                    chunk.start,
                    chunk.sizes,
                    TORCH_DTYPES[saved.dtype],
                )
                yield Read(place, inside, view[shared.within(box)])
