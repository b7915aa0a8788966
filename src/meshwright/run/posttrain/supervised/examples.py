"""`Examples`: every example of a run under one number, and any of them as one packed row.

Those trained on come first, then those held out, then answers under prompts of others (for KTO).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
        self.padding = sets[0].padding
        self.liked: NDArray[np.bool_] = np.concatenate([one.liked for one in sets])
        self.fingerprint = fingerprint(*(one.fingerprint for one in sets))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, number: int) -> Example:
        own = int(np.searchsorted(self.firsts, number, side="right")) - 1
        return self.sets[own].example(number - int(self.firsts[own]))

    def first_token(self, number: int) -> int:
        """Return the place of an example's first token among the tokens of all sets."""
        own = int(np.searchsorted(self.firsts, number, side="right")) - 1
        before = sum(len(one.tokens) for one in self.sets[:own])
        return before + int(self.sets[own].starts[number - int(self.firsts[own])])

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

    def row(
        self, numbers: Sequence[int], device: torch.device | str = "cpu", *, size: int = 0
    ) -> Batch:
        """Return examples as one sequence, packed end to end and padded up to a size.

        Rows of one size let a GPU keep the products that were found fastest for it.
        """
        found = [self[number] for number in numbers]
        lengths = [len(one.tokens) for one in found]
        padding = max(0, size - sum(lengths))
        filled = np.concatenate([one.tokens for one in found])
        tokens = np.pad(filled.astype(np.int64), (0, padding), constant_values=self.padding)
        labels = np.full(len(tokens), IGNORED, np.int64)
        ends = np.cumsum([len(one.tokens) for one in found])
        for one, end in zip(found, ends.tolist(), strict=True):
            first = end - len(one.tokens)
            inside = np.flatnonzero(one.trained[1:])
            labels[first + inside] = one.tokens[1 + inside]
        documents = Documents.of_lengths([[*lengths, padding] if padding else lengths])
        positions = documents.positions(1, len(tokens))
        note = Note(
            len(found) + bool(padding), documents.longest, int((labels != IGNORED).sum()),
            len(filled), tuple(numbers),
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


class TrainedAt(NamedTuple):
    """Where a batch is trained, known without asking its device."""

    positions: Tensor
    """Among the B·T of the batch, int64: those whose next token is trained."""
    owners: Tensor
    """Which of the batch's examples each belongs to, by its place among them."""
    tokens: Tensor
    """Place, among the tokens of all sets, of the token that comes next."""


def trained_at(examples: Examples, batch: Batch) -> TrainedAt:
    """Return the positions of a batch that are trained, example by example."""
    length, place = batch.tokens_BT.shape[1], 0
    positions, owners, tokens = list[Ints](), list[Ints](), list[Ints]()
    for row, note in enumerate(batch.sequences):
        at = row * length
        for number in note.examples:
            trained = examples[number].trained
            inside = np.flatnonzero(trained[1:])
            positions.append(at + inside)
            owners.append(np.full(len(inside), place))
            tokens.append(examples.first_token(number) + 1 + inside)
            at += len(trained)
            place += 1
    device = batch.tokens_BT.device
    found = (np.concatenate(one) for one in (positions, owners, tokens))
    return TrainedAt(*(torch.from_numpy(one.astype(np.int64)).to(device) for one in found))


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
