"""`Planner`: who writes which part of which tensor.

The plan is made before anything is copied, so a rank copies only what it writes. It is kept, and
made anew only when some rank's names, shapes, types or places change.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.policy.boxes import Extent
from meshwright.run.nn.placed import Placed
from meshwright.run.train.checkpoint.dealing import Claim, Claims, deal_out
from meshwright.run.train.checkpoint.given import Tensors, to_save, unfit
from meshwright.run.train.checkpoint.image import Box, FileImage, dtype_name, lay_out
from meshwright.run.train.checkpoint.peers import Peers
from meshwright.run.train.checkpoint.record import SavedChunk, SavedTensor


class Piece(NamedTuple):
    """What is copied of a tensor: a cut of one of its parts."""

    name: str
    part: int
    cut: tuple[slice, ...]


class Planned(NamedTuple):
    """What this rank writes, and on the first rank, what all write together."""

    image: FileImage
    pieces: tuple[Piece, ...]
    """One for each box of the image."""
    tensors: dict[str, SavedTensor]
    """Where everything goes; only known to the first."""


class Planner:
    """Plans saves, remembering the last plan."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._placed: dict[str, Placed] = {}
        self._seen: tuple[object, ...] = ()
        self._planned: Planned | None = None

    def plan(self, tensors: Tensors, problems: Sequence[Problem] = ()) -> Planned:
        """Decide what each rank writes; all ranks call it together.

        Problems that some rank already found, or finds here, are raised on every rank.
        """
        mine = [*problems, *unfit(tensors)]
        self._placed = {} if mine else to_save(tensors)
        seen = tuple(
            (name, each.tensor.dtype, each.whole, each.parts) for name, each in self._placed.items()
        )
        known = self._planned if seen == self._seen else None
        changed, wrong = self._peers.combine(
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

    def local(self, piece: Piece) -> torch.Tensor:
        """Return the part of this rank's tensor that a piece names."""
        placed = self._placed[piece.name]
        if piece.part < 0:
            return placed.tensor.detach().new_empty(0)
        return placed.view(placed.parts[piece.part])[piece.cut]

    def let_go(self) -> None:
        """Hold no tensor of the last plan any more: their memory may be wanted elsewhere."""
        self._placed = {}

    @property
    def on_gpu(self) -> bool:
        """Whether any tensor of the last plan is on a GPU."""
        return any(each.tensor.is_cuda for each in self._placed.values())

    def _fresh(self) -> Planned:
        everyone: list[list[Box]] = []

        def decide(ranks: list[Claims]) -> list[tuple[list[Box], list[Problem]]]:
            boxes, problems = deal_out(ranks)
            everyone[:] = boxes
            return [(each, problems) for each in boxes]

        mine, problems = self._peers.deal(lambda: claims_of(self._placed), decide)
        if problems:
            raise InputError(problems)
        image = lay_out(self._peers.rank, mine)
        pieces = tuple(_piece(box, self._placed[box.tensor]) for box in image.boxes)
        return Planned(image, pieces, _index(everyone))


def claims_of(placed: dict[str, Placed]) -> Claims:
    """Return what this rank holds, without the numbers."""
    return {
        name: Claim(
            dtype_name(each.tensor.dtype, name),
            each.whole,
            tuple(Extent(part.offsets, part.sizes) for part in each.parts),
        )
        for name, each in placed.items()
    }


def _piece(box: Box, placed: Placed) -> Piece:
    """Find a box among a tensor's parts."""
    wanted = Extent(box.offsets, box.sizes)
    if not wanted.elements:
        return Piece(box.tensor, -1, ())
    for number, part in enumerate(placed.parts):
        whole = Extent(part.offsets, part.sizes)
        if whole.contains(wanted):
            return Piece(box.tensor, number, wanted.within(whole))
    raise AssertionError(f"{box.key} is not held here")


def _index(ranks: list[list[Box]]) -> dict[str, SavedTensor]:
    """Find every box of every rank in the files that they will write."""
    tensors: dict[str, SavedTensor] = {}
    chunks: dict[str, list[SavedChunk]] = {}
    writers = [rank for rank, boxes in enumerate(ranks) if boxes]
    for file, rank in enumerate(writers):
        image = lay_out(rank, ranks[rank])
        for box, start in zip(image.boxes, image.starts, strict=True):
            chunk = SavedChunk(offsets=box.offsets, sizes=box.sizes, file=file, start=start)
            chunks.setdefault(box.tensor, []).append(chunk)
            tensors[box.tensor] = SavedTensor(dtype=box.dtype, shape=box.shape, chunks=())
    return {
        name: SavedTensor(dtype=one.dtype, shape=one.shape, chunks=tuple(chunks[name]))
        for name, one in tensors.items()
    }
