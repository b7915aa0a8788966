"""`ChatBatches`: the batch of any step of prepared chats, as run/train's `BatchDataset` are.

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
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.posttrain.data.dataset_stats import DatasetStats
from meshwright.run.posttrain.data.prepared_dataset import PreparedDataset
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens
from meshwright.run.train.data.batch import BatchBuffers, TrainBatch, lay_out_spans
from meshwright.run.train.data.batch_dataset import BatchDataset, BatchShape
from meshwright.run.train.data.blend import Blend
from meshwright.run.train.data.corpus.corpus import Corpus, Ints
from meshwright.run.train.data.corpus.vocabulary import Vocabulary
from meshwright.run.train.data.document_split import select_split
from meshwright.run.train.data.packing.best_fit_packing import BestFitPacking, plan_in_memory
from meshwright.run.train.data.packing.sequence_packing import (
    NoPacking,
    SequencePacking,
    TokenSpans,
)
from meshwright.run.train.data.sequence_stream import SequenceStream

Packing = Literal["pack", "none"]


@dataclass(frozen=True, eq=False)
class BatchExamples:
    """Which examples the sequences of a batch hold, in order."""

    example_ids: tuple[tuple[int, ...], ...]
    """Numbers of the examples in each sequence."""
    document_counts: tuple[int, ...]
    """Documents of each sequence, its padding counted as one."""
    is_preferred: tuple[tuple[bool, ...], ...]
    """Which of them are chosen, or judged well."""

    @property
    def example_documents(self) -> Tensor:
        """Number, among the batch's documents, of each example, int64.

        Of pairs, the even ones are chosen and the odd ones their rejected partners.
        """
        found, before = [], 0
        for examples, documents in zip(self.example_ids, self.document_counts, strict=True):
            found += [before + number for number in range(len(examples))]
            before += documents
        return torch.tensor(found, dtype=torch.int64)

    @property
    def labels(self) -> Tensor:
        """Whether each example is liked, bool, in the order of `example_documents`."""
        return torch.tensor([one for row in self.is_preferred for one in row], dtype=torch.bool)

    def split(self, microbatch: int) -> list["BatchExamples"]:
        """Return them in parts of so many sequences, as `TrainBatch.split` does."""
        return [
            BatchExamples(
                self.example_ids[first : first + microbatch],
                self.document_counts[first : first + microbatch],
                self.is_preferred[first : first + microbatch],
            )
            for first in range(0, len(self.example_ids), microbatch)
        ]


def mask_batch_tokens(batch: TrainBatch) -> MaskedTokens:
    """Return which tokens of a batch count and whose they are, for sums over its documents.

    Position t counts where the token after it is trained. `sums(…)[examples.example_documents]` are
    those of the examples, in order.
    """
    assert batch.documents is not None
    size, length = batch.tokens_BT.shape
    return MaskedTokens(
        batch.labels_BT != IGNORE_INDEX,
        batch.documents.ids(size, length),
        sum(sequence.documents for sequence in batch.sequences),
    )


class ChatBatches(BatchDataset):
    """All batches of a run over prepared chats, pairs or verdicts."""

    def __init__(
        self,
        dataset: PreparedDataset,
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
        first_example_id: int = 0,
    ) -> None:
        """Plan the sequences of prepared data.

        Args:
            dataset: What to train on; it was fitted to the length of the sequences.
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
            first_example_id: Number of the first example in `Sequence.examples`, where other sets
                of a run have those before it.
        """
        self.dataset, self.first_example_id = dataset, first_example_id
        corpus = _corpus(dataset, vocabulary)
        cutting = _Examples(dataset, _cut(dataset, corpus, packing))
        key = (seed, "chats")
        # Rows that hold several documents, even one pair, keep them apart as packed ones do.
        shape = BatchShape(dataset.sequence_length, global_batch, "pack", rank, world)
        order = (dataset.sequence_length, packing, shuffle, *key)
        super().__init__(
            [SequenceStream(corpus, cutting, key=key, shuffle=shuffle)],
            Blend([1.0]),
            shape,
            vocabulary=vocabulary,
            vocabulary_size=vocabulary_size,
            fingerprint_of=msgspec.json.encode(order).decode(),
            ahead=ahead,
            workers=workers,
        )
        self._padding = dataset.pad_token_id
        self.stats = msgspec.structs.replace(_figures(dataset, cutting), batch_size=global_batch)

    def get_batch(self, step: int, into: BatchBuffers | None = None) -> TrainBatch:
        """Return the batch of a step, with labels where tokens are trained."""
        made = super().get_batch(step, into)
        pieces = self._of(step)
        placed = lay_out_spans(pieces, self.shape.local_batch)
        trained = np.zeros((self.shape.local_batch, self.shape.sequence_length + 1), bool)
        rows = (pieces.row, pieces.start, pieces.length, placed.row_offsets)
        for row, start, length, offset in zip(*(one.tolist() for one in rows), strict=True):
            # What comes before a piece does not lead to its first token.
            trained[row, offset + 1 : offset + length] = self.dataset.loss_mask[
                start + 1 : start + length
            ]
        made.labels_BT.numpy()[~trained[:, 1:]] = IGNORE_INDEX
        targets = trained[:, 1:].sum(1).tolist()
        numbers = self._numbers(pieces) + self.first_example_id
        notes = [
            note._replace(num_targets=count, examples=tuple(numbers[pieces.row == row].tolist()))
            for row, (note, count) in enumerate(zip(made.sequences, targets, strict=True))
        ]
        return replace(made, sequences=tuple(notes))

    def examples_of(self, step: int) -> BatchExamples:
        """Return which examples the batch of a step holds, and where."""
        pieces = self._of(step)
        batch = self.shape.local_batch
        filled = lay_out_spans(pieces, batch).row_lengths
        numbers = self._numbers(pieces)
        rows = [numbers[pieces.row == row].tolist() for row in range(batch)]
        padded = (filled < self.shape.sequence_length).tolist()
        return BatchExamples(
            tuple(map(tuple, rows)),
            tuple(len(row) + more for row, more in zip(rows, padded, strict=True)),
            tuple(tuple(self.dataset.is_preferred[row].tolist()) for row in rows),
        )

    def _of(self, step: int) -> TokenSpans:
        first = step * self.shape.global_batch + self.shape.dp_rank * self.shape.local_batch
        return self._pieces(
            self.blend.select_sources(np.arange(first, first + self.shape.local_batch))
        )[0]

    def _numbers(self, pieces: TokenSpans) -> Ints:
        """Return the example that each piece is of."""
        found: Ints = np.searchsorted(self.dataset.example_starts, pieces.start, side="right") - 1
        return found


class _Examples:
    """A cutting of units, taken apart into their examples."""

    def __init__(self, prepared: PreparedDataset, units: SequencePacking) -> None:
        self.sequences = units.sequences
        self._prepared, self._units = prepared, units
        self._each = int(np.diff(prepared.unit_starts).max())
        self.max_documents = units.max_documents * self._each + 1

    def get_spans(self, epoch: int, numbers: Ints) -> TokenSpans:
        """Return the pieces of these sequences."""
        found = self._units.get_spans(epoch, numbers)
        if self._each == 1:
            return found
        starts = self._prepared.example_starts
        first = np.searchsorted(starts, found.start)
        both = (first[:, None] + np.arange(self._each)).reshape(-1)
        return TokenSpans(
            np.repeat(found.row, self._each), starts[both], starts[both + 1] - starts[both]
        )


def _corpus(prepared: PreparedDataset, vocabulary: Vocabulary | None) -> Corpus:
    """Return prepared units as the documents of a corpus in memory."""
    edges = prepared.example_starts[prepared.unit_starts]

    def index(units: Ints) -> tuple[Ints, Ints]:
        return edges[units], edges[units + 1] - edges[units]

    return Corpus(
        name="data",
        format="chats",
        num_documents=prepared.num_units,
        num_tokens=len(prepared.tokens),
        dtype=prepared.tokens.dtype,
        token_arrays=(prepared.tokens,),
        array_offsets=np.zeros(1, np.int64),
        lookup_documents=index,
        fingerprint=prepared.fingerprint,
        vocabulary=vocabulary,
    )


def _cut(prepared: PreparedDataset, corpus: Corpus, packing: Packing) -> SequencePacking:
    selection = select_split(corpus)
    if packing == "none":
        longest = int(np.diff(prepared.example_starts[prepared.unit_starts]).max())
        if longest > prepared.sequence_length:
            what = (
                f"a chat of {longest:,} tokens does not fit {prepared.sequence_length:,} positions"
            )
            raise InputError([Problem("packing", what, "pack, or length_policy = truncate")])
        return NoPacking(selection, prepared.sequence_length)
    plan = plan_in_memory(selection, prepared.sequence_length)
    return BestFitPacking(
        selection, prepared.sequence_length, plan, int(np.diff(plan.sequence_offsets).max())
    )


def _figures(prepared: PreparedDataset, cutting: SequencePacking) -> DatasetStats:
    pieces = cutting.get_spans(0, np.arange(cutting.sequences))
    filled = lay_out_spans(pieces, cutting.sequences).row_lengths
    starts = prepared.example_starts
    numbers = np.searchsorted(starts, pieces.start, side="right") - 1
    counts: Row[int] = np.bincount(numbers, minlength=len(starts) - 1).tolist()
    return msgspec.structs.replace(
        prepared.stats,
        sequence_length=prepared.sequence_length,
        sequences=cutting.sequences,
        filled_tokens=int(np.minimum(filled, prepared.sequence_length).sum()),
        split_examples=sum(count > 1 for count in counts),
    )
