"""`ChatBatches`: the batch of any step of prepared chats, as run/train's `Batches` are.

Sequences are packed by the same best fit, order and place by the same rules: sequence n of a run is
a function of the seed alone, so a run goes on from any step, under any number of ranks. Examples
are documents: attention does not cross them, positions begin anew. What differs is that a unit of
two examples stays in one sequence, and that labels are left out where nothing is trained.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.labels import IGNORED
from meshwright.run.posttrain.data.figures import Figures
from meshwright.run.posttrain.data.prepared import Prepared
from meshwright.run.posttrain.objectives.tokens import Tokens
from meshwright.run.train.data.batch import Batch, Buffers, place
from meshwright.run.train.data.batches import Batches, Shape
from meshwright.run.train.data.blend import Blend
from meshwright.run.train.data.corpus import Corpus, Ints
from meshwright.run.train.data.packing import Pack, plan_in_memory
from meshwright.run.train.data.pieces import Cutting, Pieces, Single
from meshwright.run.train.data.selection import select
from meshwright.run.train.data.stream import Stream
from meshwright.run.train.data.vocabulary import Vocabulary

Packing = Literal["pack", "none"]


@dataclass(frozen=True, eq=False)
class Members:
    """Which examples the sequences of a batch hold, in order."""

    examples: tuple[tuple[int, ...], ...]
    """Numbers of the examples in each sequence."""
    documents: tuple[int, ...]
    """Documents of each sequence, its padding counted as one."""
    liked: tuple[tuple[bool, ...], ...]
    """Which of them are chosen, or judged well."""

    @property
    def places(self) -> Tensor:
        """Number, among the batch's documents, of each example, int64.

        Of pairs, the even ones are chosen and the odd ones their rejected partners.
        """
        found, before = [], 0
        for examples, documents in zip(self.examples, self.documents, strict=True):
            found += [before + number for number in range(len(examples))]
            before += documents
        return torch.tensor(found, dtype=torch.int64)

    @property
    def verdicts(self) -> Tensor:
        """Whether each example is liked, bool, in the order of `places`."""
        return torch.tensor([one for row in self.liked for one in row], dtype=torch.bool)

    def split(self, microbatch: int) -> list["Members"]:
        """Return them in parts of so many sequences, as `Batch.split` does."""
        return [
            Members(
                self.examples[first : first + microbatch],
                self.documents[first : first + microbatch],
                self.liked[first : first + microbatch],
            )
            for first in range(0, len(self.examples), microbatch)
        ]


def counted(batch: Batch) -> Tokens:
    """Return which tokens of a batch count and whose they are, for sums over its documents.

    Position t counts where the token after it is trained. `sums(…)[members.places]` are those of
    the examples, in order.
    """
    assert batch.documents is not None
    size, length = batch.tokens_BT.shape
    return Tokens(
        batch.labels_BT != IGNORED,
        batch.documents.ids(size, length),
        sum(sequence.documents for sequence in batch.sequences),
    )


class ChatBatches(Batches):
    """All batches of a run over prepared chats, pairs or verdicts."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        global_batch: int,
        packing: Packing = "pack",
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        vocabulary_size: int | None = None,
        vocabulary: Vocabulary | None = None,
        ahead: int = 4,
        workers: int = 1,
        first: int = 0,
    ) -> None:
        """Plan the sequences of prepared data.

        Args:
            prepared: What to train on; it was fitted to the length of the sequences.
            global_batch: Sequences of a step over all ranks.
            packing: Whether sequences hold several units, or one each.
            seed: Gives the order of sequences in every epoch.
            shuffle: Whether there is such an order, or that of the plan.
            rank: Which data-parallel replica this is.
            world: How many of them there are.
            vocabulary_size: The model's; tokens that it does not know are refused.
            vocabulary: What tokens mean, where somebody wants to know.
            ahead: Batches made in advance by `iterate`.
            workers: Threads that make them.
            first: Number of the first example in `Sequence.examples`, where other sets of a run
                have those before it.
        """
        self.prepared, self.first = prepared, first
        corpus = _corpus(prepared, vocabulary)
        cutting = _Examples(prepared, _cut(prepared, corpus, packing))
        key = (seed, "chats")
        # Rows that hold several documents, even one pair, keep them apart as packed ones do.
        shape = Shape(prepared.length, global_batch, "pack", rank, world)
        order = (prepared.length, packing, shuffle, *key)
        super().__init__(
            [Stream(corpus, cutting, key=key, shuffle=shuffle)],
            Blend([1.0]),
            shape,
            vocabulary=vocabulary,
            vocabulary_size=vocabulary_size,
            fingerprint_of=msgspec.json.encode(order).decode(),
            ahead=ahead,
            workers=workers,
        )
        self._padding = prepared.padding
        self.figures = msgspec.structs.replace(_figures(prepared, cutting), batch=global_batch)

    def at(self, step: int, into: Buffers | None = None) -> Batch:
        """Return the batch of a step, with labels where tokens are trained."""
        made = super().at(step, into)
        pieces = self._of(step)
        placed = place(pieces, self.shape.batch)
        trained = np.zeros((self.shape.batch, self.shape.length + 1), bool)
        rows = (pieces.row, pieces.start, pieces.length, placed.offset)
        for row, start, length, offset in zip(*(one.tolist() for one in rows), strict=True):
            # What comes before a piece does not lead to its first token.
            trained[row, offset + 1 : offset + length] = self.prepared.trained[
                start + 1 : start + length
            ]
        made.labels_BT.numpy()[~trained[:, 1:]] = IGNORED
        targets = trained[:, 1:].sum(1).tolist()
        numbers = self._numbers(pieces) + self.first
        notes = [
            note._replace(targets=count, examples=tuple(numbers[pieces.row == row].tolist()))
            for row, (note, count) in enumerate(zip(made.sequences, targets, strict=True))
        ]
        return replace(made, sequences=tuple(notes))

    def members(self, step: int) -> Members:
        """Return which examples the batch of a step holds, and where."""
        pieces = self._of(step)
        batch = self.shape.batch
        filled = place(pieces, batch).filled
        numbers = self._numbers(pieces)
        rows = [numbers[pieces.row == row].tolist() for row in range(batch)]
        padded = (filled < self.shape.length).tolist()
        return Members(
            tuple(map(tuple, rows)),
            tuple(len(row) + more for row, more in zip(rows, padded, strict=True)),
            tuple(tuple(self.prepared.liked[row].tolist()) for row in rows),
        )

    def _of(self, step: int) -> Pieces:
        first = step * self.shape.global_batch + self.shape.rank * self.shape.batch
        return self._pieces(self.blend.drawn(np.arange(first, first + self.shape.batch)))[0]

    def _numbers(self, pieces: Pieces) -> Ints:
        """Return the example that each piece is of."""
        found: Ints = np.searchsorted(self.prepared.starts, pieces.start, side="right") - 1
        return found


class _Examples:
    """A cutting of units, taken apart into their examples."""

    def __init__(self, prepared: Prepared, units: Cutting) -> None:
        self.sequences = units.sequences
        self._prepared, self._units = prepared, units
        self._each = int(np.diff(prepared.firsts).max())
        self.most_documents = units.most_documents * self._each + 1

    def pieces(self, epoch: int, numbers: Ints) -> Pieces:
        """Return the pieces of these sequences."""
        found = self._units.pieces(epoch, numbers)
        if self._each == 1:
            return found
        starts = self._prepared.starts
        first = np.searchsorted(starts, found.start)
        both = (first[:, None] + np.arange(self._each)).reshape(-1)
        return Pieces(
            np.repeat(found.row, self._each), starts[both], starts[both + 1] - starts[both]
        )


def _corpus(prepared: Prepared, vocabulary: Vocabulary | None) -> Corpus:
    """Return prepared units as the documents of a corpus in memory."""
    edges = prepared.starts[prepared.firsts]

    def index(units: Ints) -> tuple[Ints, Ints]:
        return edges[units], edges[units + 1] - edges[units]

    return Corpus(
        name="data",
        kind="chats",
        documents=prepared.units,
        tokens=len(prepared.tokens),
        dtype=prepared.tokens.dtype,
        parts=(prepared.tokens,),
        firsts=np.zeros(1, np.int64),
        index=index,
        fingerprint=prepared.fingerprint,
        vocabulary=vocabulary,
    )


def _cut(prepared: Prepared, corpus: Corpus, packing: Packing) -> Cutting:
    selection = select(corpus)
    if packing == "none":
        longest = int(np.diff(prepared.starts[prepared.firsts]).max())
        if longest > prepared.length:
            what = f"a chat of {longest:,} tokens does not fit {prepared.length:,} positions"
            raise InputError([Problem("packing", what, "pack, or cut what is too long")])
        return Single(selection, prepared.length)
    plan = plan_in_memory(selection, prepared.length)
    return Pack(selection, prepared.length, plan, int(np.diff(plan.firsts).max()))


def _figures(prepared: Prepared, cutting: Cutting) -> Figures:
    pieces = cutting.pieces(0, np.arange(cutting.sequences))
    filled = place(pieces, cutting.sequences).filled
    starts = prepared.starts
    numbers = np.searchsorted(starts, pieces.start, side="right") - 1
    counts: Row[int] = np.bincount(numbers, minlength=len(starts) - 1).tolist()
    return msgspec.structs.replace(
        prepared.figures,
        length=prepared.length,
        sequences=cutting.sequences,
        filled=int(np.minimum(filled, prepared.length).sum()),
        split=sum(count > 1 for count in counts),
    )
