"""Packing `concat`: shuffled documents laid end to end, cut every T tokens, as Megatron does.

Sequence i of an epoch is tokens i·T to (i + 1)·T of that epoch's row, both included. Where document
k of the row starts is the sum of all lengths before it; sums are kept for blocks of documents only,
and those inside a block are made again when one of its sequences is read, so an epoch costs one
pass over the lengths and a quarter of a byte per document.
"""

import threading
from collections import OrderedDict

import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.train.data.corpus.corpus import Ints
from meshwright.run.train.data.document_split import DocumentSplit
from meshwright.run.train.data.packing.sequence_packing import TokenSpans
from meshwright.run.train.data.permutation import make_permutation_key, permute_indices

MIN_BLOCK = 32
_CHUNK_BLOCKS = 1 << 12
_EPOCHS_KEPT = 2


class ConcatPacking:
    """Cuts one long row of documents, in a new order in each epoch."""

    max_documents = 1
    """Attention spans the sequence, whatever lies in it."""

    def __init__(
        self, selection: DocumentSplit, length: int, *, key: tuple[object, ...], shuffle: bool
    ) -> None:
        self.sequences = (selection.num_tokens - 1) // length
        if not self.sequences:
            what = f"has {selection.num_tokens:,} tokens, too few for a sequence of {length:,}"
            raise InputError(
                [Problem(selection.corpus.name, what, "add text, or shorten the sequence")]
            )
        self._selection = selection
        self._length = length
        self._key = key
        self._shuffle = shuffle
        # About one sequence to a block: a sequence then touches two.
        mean = selection.num_tokens / selection.num_documents
        self._block = max(MIN_BLOCK, round(length / mean))
        self._ends: OrderedDict[int, Ints] = OrderedDict()
        self._making = threading.Lock()

    def get_spans(self, epoch: int, numbers: Ints) -> TokenSpans:
        """Return the pieces of these sequences."""
        ends = self._block_ends(epoch)
        first_token = numbers * self._length
        last_token = first_token + self._length
        blocks = _ranges(
            np.searchsorted(ends, first_token, side="right"),
            np.searchsorted(ends, last_token, side="right"),
        )
        starts, lengths, tops = self._documents(epoch, np.unique(blocks), ends)
        first = np.searchsorted(tops, first_token, side="right")
        last = np.searchsorted(tops, last_token, side="right")
        chosen = _ranges(first, last)
        row = np.repeat(np.arange(len(numbers)), last - first + 1)
        # A sequence begins inside its first document and ends inside its last.
        bottoms = tops[chosen] - lengths[chosen]
        begin = np.maximum(bottoms, first_token[row])
        end = np.minimum(tops[chosen], last_token[row] + 1)
        some = np.flatnonzero(end > begin)
        start = starts[chosen] + (begin - bottoms)
        return TokenSpans(row[some], start[some], (end - begin)[some])

    def _documents(self, epoch: int, blocks: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
        """Return start, length and end in the row of the documents of some blocks, in order."""
        places = (blocks[:, None] * self._block + np.arange(self._block)).ravel()
        inside = places < self._selection.num_documents
        starts, lengths = self._spans(epoch, places[inside])
        tops = np.zeros(len(places), np.int64)
        tops[inside] = lengths
        tops = tops.reshape(len(blocks), self._block).cumsum(axis=1)
        tops += (ends[blocks] - tops[:, -1])[:, None]
        return starts, lengths, tops.ravel()[inside]

    def _spans(self, epoch: int, places: Ints) -> tuple[Ints, Ints]:
        count = self._selection.num_documents
        if self._shuffle:
            places = permute_indices(
                places, count, make_permutation_key(*self._key, "documents", epoch)
            )
        return self._selection.get_document_spans(places)

    def _block_ends(self, epoch: int) -> Ints:
        """Return the tokens up to the end of each block of an epoch's row."""
        with self._making:
            found = self._ends.get(epoch)
            if found is None:
                found = self._ends[epoch] = self._sum_blocks(epoch)
                if len(self._ends) > _EPOCHS_KEPT:
                    self._ends.popitem(last=False)
            self._ends.move_to_end(epoch)
            return found

    def _sum_blocks(self, epoch: int) -> Ints:
        count = self._selection.num_documents
        step = self._block * _CHUNK_BLOCKS
        sums = []
        for first in range(0, count, step):
            _, lengths = self._spans(epoch, np.arange(first, min(first + step, count)))
            sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), self._block)))
        ends: Ints = np.cumsum(np.concatenate(sums))
        if ends[-1] != self._selection.num_tokens:
            what = f"its documents hold {ends[-1]:,} of {self._selection.num_tokens:,} tokens"
            fix = "its index is damaged: tokenize the text again"
            raise DamagedFile([Problem(self._selection.corpus.name, what, fix)])
        return ends


def _ranges(first: Ints, last: Ints) -> Ints:
    """Return first, first + 1, … last of each pair, one pair after the other."""
    counts = last - first + 1
    ends = np.cumsum(counts)
    found: Ints = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)
    return found
