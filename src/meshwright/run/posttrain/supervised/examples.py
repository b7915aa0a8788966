"""`Examples`: every example of a run under one number, and any of them as one packed row.

Those trained on come first, then those held out, then answers under prompts of others (for KTO).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.run.kernels.documents import Documents
from meshwright.run.kernels.labels import IGNORED
from meshwright.run.posttrain.data.encoding import Example
from meshwright.run.posttrain.data.prepared import Prepared
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.data.batch import Sequence as Note
from meshwright.run.train.data.corpus import Ints
from meshwright.run.train.data.fingerprint import fingerprint


class Examples:
    """Sets of examples, numbered from the first of the first set on."""

    def __init__(self, sets: Sequence[Prepared]) -> None:
        self.sets = tuple(sets)
        counts = [len(one.starts) - 1 for one in sets]
        self.firsts: Ints = np.concatenate([[0], np.cumsum(counts)])
        """Number of the first example of each set, and last the number of all."""
        self.liked: NDArray[np.bool_] = np.concatenate([one.liked for one in sets])
        self.fingerprint = fingerprint(*(one.fingerprint for one in sets))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, number: int) -> Example:
        own = int(np.searchsorted(self.firsts, number, side="right")) - 1
        return self.sets[own].example(number - int(self.firsts[own]))

    def lengths(self) -> Ints:
        """Return the tokens of every example."""
        return np.concatenate([np.diff(one.starts) for one in self.sets])

    def records(self) -> tuple[str, ...]:
        """Return where every example comes from."""
        return tuple(
            where
            for one in self.sets
            for where, count in zip(one.records, np.diff(one.firsts).tolist(), strict=True)
            for _ in range(count)
        )

    def row(self, numbers: Sequence[int], device: torch.device | str = "cpu") -> Batch:
        """Return examples as one sequence, packed end to end without padding."""
        found = [self[number] for number in numbers]
        tokens = np.concatenate([one.tokens for one in found]).astype(np.int64)
        labels = np.full(len(tokens), IGNORED, np.int64)
        ends = np.cumsum([len(one.tokens) for one in found])
        for one, end in zip(found, ends.tolist(), strict=True):
            first = end - len(one.tokens)
            inside = np.flatnonzero(one.trained[1:])
            labels[first + inside] = one.tokens[1 + inside]
        documents = Documents.of_lengths([[len(one.tokens) for one in found]])
        positions = documents.positions(1, len(tokens))
        note = Note(
            len(found), documents.longest, int((labels != IGNORED).sum()), len(tokens),
            tuple(numbers),
        )  # fmt: skip
        tokens_BT, labels_BT = torch.from_numpy(tokens)[None], torch.from_numpy(labels)[None]
        return Batch(0, tokens_BT, labels_BT, positions, documents, (note,)).to(device)

    def rows(self, numbers: Sequence[int], most: int) -> Iterator[list[int]]:
        """Cut numbers into runs of at most so many tokens, or of one example."""
        lengths, run, filled = self.lengths(), list[int](), 0
        for number in numbers:
            if run and filled + int(lengths[number]) > most:
                yield run
                run, filled = [], 0
            run.append(number)
            filled += int(lengths[number])
        if run:
            yield run


def numbers_of(batch: Batch) -> list[int]:
    """Return the examples of a batch in order."""
    return [number for note in batch.sequences for number in note.examples]


def places_of(batch: Batch) -> Tensor:
    """Return the document, among the batch's, that each of its examples is, int64."""
    found, before = list[int](), 0
    for note in batch.sequences:
        found += range(before, before + len(note.examples))
        before += note.documents
    return torch.tensor(found, dtype=torch.int64, device=batch.tokens_BT.device)
