"""`TrainBatch`: the sequences of one step of one rank, and its construction from token rows.

B sequences, T positions. Knows tensors, not where tokens come from.
"""
# ruff: noqa: N815

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.train.data.corpus.corpus import Ints, Tokens
from meshwright.run.train.data.packing.sequence_packing import TokenSpans


class SequenceInfo(NamedTuple):
    """What the host knows of one sequence."""

    documents: int
    """Documents in it, its padding counted as one."""
    max_document_length: int
    """Positions of the longest."""
    num_targets: int
    """Positions that are trained."""
    num_tokens: int
    """Positions that hold a token; the rest is padding."""
    examples: tuple[int, ...] = ()
    """Numbers of its documents in their order, where they have any; its padding has none."""


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """Sequences to train on."""

    step: int
    tokens_BT: Tensor
    """Ids, int64."""
    labels_BT: Tensor
    """The id that follows each, int64; `IGNORE_INDEX` at padding and at the end of a document."""
    positions_BT: Tensor | None
    """Place of each in its document, int64; None where every sequence counts from 0 to T − 1."""
    documents: PackedSequences | None
    """Where documents start, padding being one; None where attention spans each sequence."""
    sequences: tuple[SequenceInfo, ...]

    @property
    def num_targets(self) -> int:
        """Positions that are trained: what a loss summed over them is divided by."""
        return sum(sequence.num_targets for sequence in self.sequences)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "TrainBatch":
        """Return the batch on a device."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        documents = self.documents and PackedSequences(
            moved(self.documents.cu_seqlens), self.documents.max_length
        )
        positions = None if self.positions_BT is None else moved(self.positions_BT)
        return TrainBatch(
            self.step,
            moved(self.tokens_BT),
            moved(self.labels_BT),
            positions,
            documents,
            self.sequences,
        )

    def split_microbatches(self, microbatch: int) -> list["TrainBatch"]:
        """Return the batch in parts of so many sequences, without asking the device anything."""
        if len(self.sequences) <= microbatch:
            return [self]
        return [
            self._part(first, min(first + microbatch, len(self.sequences)))
            for first in range(0, len(self.sequences), microbatch)
        ]

    def _part(self, first: int, after: int) -> "TrainBatch":
        documents = None
        if self.documents is not None:
            before = sum(sequence.documents for sequence in self.sequences[:first])
            count = sum(sequence.documents for sequence in self.sequences[first:after])
            starts = self.documents.cu_seqlens[before : before + count + 1]
            longest = max(sequence.max_document_length for sequence in self.sequences[first:after])
            documents = PackedSequences(starts - first * self.tokens_BT.shape[1], longest)
        return TrainBatch(
            self.step,
            self.tokens_BT[first:after],
            self.labels_BT[first:after],
            None if self.positions_BT is None else self.positions_BT[first:after],
            documents,
            self.sequences[first:after],
        )


class BatchBuffers:
    """Memory that a batch is made in; pinned, a GPU copies from it while the host goes on."""

    def __init__(self, batch: int, length: int, *, packed: bool, pinned: bool = False) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=pinned)

        self.tokens_BT = empty(batch, length)
        self.labels_BT = empty(batch, length)
        self.positions_BT = empty(batch, length) if packed else None
        self.starts = empty(batch * length + 1, dtype=torch.int32) if packed else None


class SpanPlacement(NamedTuple):
    """Where pieces lie in their rows."""

    row_offsets: Ints
    """Place of each piece's first token in its row."""
    row_lengths: Ints
    """Tokens in each row."""


def lay_out_spans(pieces: TokenSpans, batch: int) -> SpanPlacement:
    """Lay pieces end to end in their rows."""
    ends = np.cumsum(pieces.length)
    filled = np.bincount(pieces.row, weights=pieces.length, minlength=batch).astype(np.int64)
    before = np.cumsum(filled) - filled
    return SpanPlacement(ends - pieces.length - before[pieces.row], filled)


def assemble_batch(
    step: int,
    rows: Tokens,
    pieces: TokenSpans,
    placed: SpanPlacement,
    *,
    padding: int,
    into: BatchBuffers,
) -> TrainBatch:
    """Turn rows of T + 1 tokens, as the pieces filled them, into a batch."""
    batch, length = rows.shape[0], rows.shape[1] - 1
    tokens, labels = into.tokens_BT.numpy(), into.labels_BT.numpy()
    filled = placed.row_lengths.tolist()
    for row, count in enumerate(filled):
        if count <= length:
            rows[row, count:] = padding
    tokens[:] = rows[:, :-1]
    labels[:] = rows[:, 1:]
    if into.positions_BT is None or into.starts is None:
        ends = [max(count - 1, 0) for count in filled]
        for row, end in enumerate(ends):
            labels[row, end:] = IGNORE_INDEX
        notes = tuple(
            SequenceInfo(1, length, end, min(count, length))
            for end, count in zip(ends, filled, strict=True)
        )
        return TrainBatch(step, into.tokens_BT, into.labels_BT, None, None, notes)
    last = placed.row_offsets + pieces.length - 1
    inside = last < length
    labels[pieces.row[inside], last[inside]] = IGNORE_INDEX
    for row, count in enumerate(filled):
        if count < length:
            labels[row, count:] = IGNORE_INDEX
    starts, of_row = _starts(pieces, placed, batch, length)
    count = len(starts)
    into.starts.numpy()[:count] = starts
    lengths = np.diff(starts)
    _restart(into.positions_BT.numpy().reshape(-1), starts, lengths)
    notes = _notes(lengths, of_row, pieces, placed, length)
    longest = max(note.max_document_length for note in notes)
    documents = PackedSequences(into.starts[:count], longest)
    return TrainBatch(step, into.tokens_BT, into.labels_BT, into.positions_BT, documents, notes)


def _starts(
    pieces: TokenSpans, placed: SpanPlacement, batch: int, length: int
) -> tuple[Ints, Ints]:
    """Return where documents and paddings start in B·T tokens, then B·T; and the row of each."""
    padded = np.flatnonzero(placed.row_lengths < length)
    starts = np.concatenate(
        [pieces.row * length + placed.row_offsets, padded * length + placed.row_lengths[padded]]
    )
    starts.sort()
    return np.append(starts, batch * length), starts // length


def _restart(positions: NDArray[np.int64], starts: Ints, lengths: Ints) -> None:
    """Count positions from zero in every document."""
    # Ones summed up count on; what a document counted is taken off where the next begins.
    positions.fill(1)
    positions[0] = 0
    positions[starts[1:-1]] -= lengths[:-1]
    np.cumsum(positions, out=positions)


def _notes(
    lengths: Ints, of_row: Ints, pieces: TokenSpans, placed: SpanPlacement, length: int
) -> tuple[SequenceInfo, ...]:
    batch = len(placed.row_lengths)
    counts = np.bincount(of_row, minlength=batch)
    longest = np.maximum.reduceat(lengths, np.cumsum(counts) - counts)
    # A piece trains one position less than it has tokens: its last token is a label only, or has
    # no successor.
    targets = placed.row_lengths - np.bincount(pieces.row, minlength=batch)
    columns = (counts, longest, targets, np.minimum(placed.row_lengths, length))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(SequenceInfo(*row) for row in rows)
