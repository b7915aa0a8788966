"""`SequenceStream`: the endless row of sequences of one source, epoch after epoch.

Place n of the row is sequence n mod S of epoch ⌊n / S⌋, in an order that the seed and the epoch
give, so any place is found without the ones before it.
"""

import numpy as np

from meshwright.run.train.data.corpus.corpus import Corpus, Ints
from meshwright.run.train.data.packing.sequence_packing import SequencePacking, TokenSpans
from meshwright.run.train.data.permutation import make_permutation_key, permute_indices


class SequenceStream:
    """One source, cut into sequences and shuffled."""

    def __init__(
        self, corpus: Corpus, packing: SequencePacking, *, key: tuple[object, ...], shuffle: bool
    ) -> None:
        self.corpus = corpus
        self.packing = packing
        self._key = key
        self._shuffle = shuffle

    def get_spans(self, places: Ints) -> TokenSpans:
        """Return the pieces of these places of the row, one row for each."""
        epochs, inside = np.divmod(places, self.packing.sequences)
        if epochs[0] == epochs[-1]:  # places rise, so all are of one epoch
            return self._of_epoch(int(epochs[0]), inside)
        parts = []
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            found = self._of_epoch(int(epoch), inside[rows])
            parts.append(found._replace(row=rows[found.row]))
        return TokenSpans(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _of_epoch(self, epoch: int, numbers: Ints) -> TokenSpans:
        if self._shuffle:
            key = make_permutation_key(*self._key, "sequences", epoch)
            numbers = permute_indices(numbers, self.packing.sequences, key)
        return self.packing.get_spans(epoch, numbers)
