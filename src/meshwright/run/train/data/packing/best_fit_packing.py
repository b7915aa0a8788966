"""Packing `pack`: whole documents fill sequences as tightly as they can, and stay apart.

Documents longer than a sequence are split into full ones and a rest; rests and shorter documents
are packed by best fit within windows of some ten thousand documents, which lie in an order of their
own so that neighbours on disk do not share sequences. As a mask keeps documents apart, it does not
matter which share a sequence: the plan is made once, holds for every seed and epoch, and only the
order of sequences changes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.run.train.data.corpus.corpus import Ints
from meshwright.run.train.data.document_split import DocumentSplit
from meshwright.run.train.data.packing.best_fit import best_fit
from meshwright.run.train.data.packing.sequence_packing import TokenSpans
from meshwright.run.train.data.permutation import make_permutation_key, permute_indices

MIN_WINDOW = 1 << 16
MAX_WINDOW = 1 << 20
_SEQUENCES_PER_WINDOW = 512
"""With fewer, the sequences left half full at a window's end would count."""


class PackingPlan(NamedTuple):
    """What lies in which sequence."""

    sequence_offsets: Ints
    """Number of the first piece of each sequence, and last the number of pieces."""
    documents: NDArray[np.unsignedinteger]
    """Document of each piece, by its place in the selection."""
    document_parts: NDArray[np.uint32]
    """Which full sequence's worth of its document a piece is, from 0."""


class PackingWindow(NamedTuple):
    """A plan of some documents, in the same terms; counts instead of firsts."""

    sequence_document_counts: Ints
    documents: Ints
    document_parts: Ints


def plan_windows(selection: DocumentSplit, length: int) -> Iterator[PackingWindow]:
    """Yield the plan window by window."""
    count = selection.num_documents
    mean = max(1.0, selection.num_tokens / count)
    wanted = round(_SEQUENCES_PER_WINDOW * length / mean)
    window = min(max(MIN_WINDOW, wanted), MAX_WINDOW)
    key = make_permutation_key("packing", selection.name, length)
    for first in range(0, count, window):
        places = permute_indices(np.arange(first, min(first + window, count)), count, key)
        yield _planned(places, selection.get_document_spans(places)[1], length)


def _planned(places: Ints, lengths: Ints, length: int) -> PackingWindow:
    whole, rest = np.divmod(lengths, length)
    full_places = np.repeat(places, whole)
    full_parts = np.arange(len(full_places)) - np.repeat(np.cumsum(whole) - whole, whole)
    some = np.flatnonzero(rest)
    bins = best_fit(rest[some], length)
    order = np.argsort(bins, kind="stable")
    return PackingWindow(
        np.concatenate([np.ones(len(full_places), np.int64), np.bincount(bins)]),
        np.concatenate([full_places, places[some][order]]),
        np.concatenate([full_parts, whole[some][order]]),
    )


def plan_in_memory(selection: DocumentSplit, length: int) -> PackingPlan:
    """Make the whole plan in memory."""
    windows = list(plan_windows(selection, length))
    counts = np.concatenate([window.sequence_document_counts for window in windows])
    return PackingPlan(
        np.concatenate([[0], np.cumsum(counts)]),
        np.concatenate([window.documents for window in windows]).astype(
            get_document_index_dtype(selection)
        ),
        np.concatenate([window.document_parts for window in windows]).astype(np.uint32),
    )


def get_document_index_dtype(selection: DocumentSplit) -> str:
    """Return the number format that holds every place."""
    return "<u4" if selection.num_documents <= 1 << 32 else "<u8"


class BestFitPacking:
    """Reads sequences by a plan."""

    def __init__(
        self, selection: DocumentSplit, length: int, plan: PackingPlan, max_documents: int
    ) -> None:
        self.sequences = len(plan.sequence_offsets) - 1
        # What pads a sequence counts as one more.
        self.max_documents = max_documents + 1
        self._selection = selection
        self._length = length
        self._plan = plan

    def get_spans(self, epoch: int, numbers: Ints) -> TokenSpans:  # noqa: ARG002 - the same in each
        """Return the pieces of these sequences."""
        plan = self._plan
        first, after = plan.sequence_offsets[numbers], plan.sequence_offsets[numbers + 1]
        counts = after - first
        ends = np.cumsum(counts)
        chosen = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)
        starts, lengths = self._selection.get_document_spans(
            plan.documents[chosen].astype(np.int64)
        )
        skipped = plan.document_parts[chosen].astype(np.int64) * self._length
        return TokenSpans(
            np.repeat(np.arange(len(numbers)), counts),
            starts + skipped,
            np.minimum(lengths - skipped, self._length + 1),
        )
