"""`Stream`: the endless row of sequences of one source, epoch after epoch.

Place n of the row is sequence n mod S of epoch ⌊n / S⌋, in an order that the seed and the epoch
give, so any place is found without the ones before it.
"""

import numpy as np

from meshwright.run.train.data.corpus import Corpus, Ints
from meshwright.run.train.data.permutation import key_of, shuffled
from meshwright.run.train.data.pieces import Cutting, Pieces


class Stream:
    """One source, cut into sequences and shuffled."""

    def __init__(
        self, corpus: Corpus, cutting: Cutting, *, key: tuple[object, ...], shuffle: bool
    ) -> None:
        self.corpus = corpus
        self.cutting = cutting
        self._key = key
        self._shuffle = shuffle

    def pieces(self, places: Ints) -> Pieces:
        """Return the pieces of these places of the row, one row for each."""
        epochs, inside = np.divmod(places, self.cutting.sequences)
        if epochs[0] == epochs[-1]:  # places rise, so all are of one epoch
            return self._of_epoch(int(epochs[0]), inside)
        parts = []
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            found = self._of_epoch(int(epoch), inside[rows])
            parts.append(found._replace(row=rows[found.row]))
        return Pieces(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _of_epoch(self, epoch: int, numbers: Ints) -> Pieces:
        if self._shuffle:
            key = key_of(*self._key, "sequences", epoch)
            numbers = shuffled(numbers, self.cutting.sequences, key)
        return self.cutting.pieces(epoch, numbers)
