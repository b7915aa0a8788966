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

from meshwright.run.train.data.best_fit import best_fit
from meshwright.run.train.data.corpus import Ints
from meshwright.run.train.data.permutation import key_of, shuffled
from meshwright.run.train.data.pieces import Pieces
from meshwright.run.train.data.selection import Selection

SMALLEST_WINDOW = 1 << 16
LARGEST_WINDOW = 1 << 20
_SEQUENCES_PER_WINDOW = 512
"""With fewer, the sequences left half full at a window's end would count."""


class Plan(NamedTuple):
    """What lies in which sequence."""

    firsts: Ints
    """Number of the first piece of each sequence, and last the number of pieces."""
    places: NDArray[np.unsignedinteger]
    """Document of each piece, by its place in the selection."""
    parts: NDArray[np.uint32]
    """Which full sequence's worth of its document a piece is, from 0."""


class Window(NamedTuple):
    """A plan of some documents, in the same terms; counts instead of firsts."""

    counts: Ints
    places: Ints
    parts: Ints


def plan_windows(selection: Selection, length: int) -> Iterator[Window]:
    """Yield the plan window by window."""
    count = selection.documents
    mean = max(1.0, selection.tokens / count)
    wanted = round(_SEQUENCES_PER_WINDOW * length / mean)
    window = min(max(SMALLEST_WINDOW, wanted), LARGEST_WINDOW)
    key = key_of("packing", selection.name, length)
    for first in range(0, count, window):
        places = shuffled(np.arange(first, min(first + window, count)), count, key)
        yield _planned(places, selection.spans(places)[1], length)


def _planned(places: Ints, lengths: Ints, length: int) -> Window:
    whole, rest = np.divmod(lengths, length)
    full_places = np.repeat(places, whole)
    full_parts = np.arange(len(full_places)) - np.repeat(np.cumsum(whole) - whole, whole)
    some = np.flatnonzero(rest)
    bins = best_fit(rest[some], length)
    order = np.argsort(bins, kind="stable")
    return Window(
        np.concatenate([np.ones(len(full_places), np.int64), np.bincount(bins)]),
        np.concatenate([full_places, places[some][order]]),
        np.concatenate([full_parts, whole[some][order]]),
    )


def plan_in_memory(selection: Selection, length: int) -> Plan:
    """Make the whole plan in memory."""
    windows = list(plan_windows(selection, length))
    counts = np.concatenate([window.counts for window in windows])
    return Plan(
        np.concatenate([[0], np.cumsum(counts)]),
        np.concatenate([window.places for window in windows]).astype(place_dtype(selection)),
        np.concatenate([window.parts for window in windows]).astype(np.uint32),
    )


def place_dtype(selection: Selection) -> str:
    """Return the number format that holds every place."""
    return "<u4" if selection.documents <= 1 << 32 else "<u8"


class Pack:
    """Reads sequences by a plan."""

    def __init__(self, selection: Selection, length: int, plan: Plan, most_documents: int) -> None:
        self.sequences = len(plan.firsts) - 1
        # What pads a sequence counts as one more.
        self.most_documents = most_documents + 1
        self._selection = selection
        self._length = length
        self._plan = plan

    def pieces(self, epoch: int, numbers: Ints) -> Pieces:  # noqa: ARG002 - the same in each
        """Return the pieces of these sequences."""
        plan = self._plan
        first, after = plan.firsts[numbers], plan.firsts[numbers + 1]
        counts = after - first
        ends = np.cumsum(counts)
        chosen = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)
        starts, lengths = self._selection.spans(plan.places[chosen].astype(np.int64))
        skipped = plan.parts[chosen].astype(np.int64) * self._length
        return Pieces(
            np.repeat(np.arange(len(numbers)), counts),
            starts + skipped,
            np.minimum(lengths - skipped, self._length + 1),
        )
