"""`ExampleIndex`: every example of a run under one number, and any of them as one packed row.

Those trained on come first, then those held out, then answers under prompts of others (for KTO).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.posttrain.data.encoding import TokenizedExample
from meshwright.run.posttrain.data.prepared_dataset import PreparedDataset
from meshwright.run.train.data.batch import SequenceInfo, TrainBatch
from meshwright.run.train.data.corpus.corpus import Ints
from meshwright.run.train.data.fingerprint import compute_fingerprint


class ExampleIndex:
    """Sets of examples, numbered from the first of the first set on."""

    def __init__(self, sets: Sequence[PreparedDataset]) -> None:
        self.datasets = tuple(sets)
        counts = [len(one.example_starts) - 1 for one in sets]
        self.first_ids: Ints = np.concatenate([[0], np.cumsum(counts)])
        """Number of the first example of each set, and last the number of all."""
        self.pad_token_id = sets[0].pad_token_id
        self.is_preferred: NDArray[np.bool_] = np.concatenate([one.is_preferred for one in sets])
        self.fingerprint = compute_fingerprint(*(one.fingerprint for one in sets))

    def __len__(self) -> int:
        return int(self.first_ids[-1])

    def __getitem__(self, number: int) -> TokenizedExample:
        own = int(np.searchsorted(self.first_ids, number, side="right")) - 1
        return self.datasets[own].get_example(number - int(self.first_ids[own]))

    def first_token(self, number: int) -> int:
        """Return the place of an example's first token among the tokens of all sets."""
        own = int(np.searchsorted(self.first_ids, number, side="right")) - 1
        before = sum(len(one.tokens) for one in self.datasets[:own])
        return before + int(self.datasets[own].example_starts[number - int(self.first_ids[own])])

    def lengths(self) -> Ints:
        """Return the tokens of every example."""
        return np.concatenate([np.diff(one.example_starts) for one in self.datasets])

    def sources(self) -> tuple[str, ...]:
        """Return where every example comes from."""
        return tuple(
            where
            for one in self.datasets
            for where, count in zip(one.sources, np.diff(one.unit_starts).tolist(), strict=True)
            for _ in range(count)
        )

    def pack_row(
        self, numbers: Sequence[int], device: torch.device | str = "cpu", *, size: int = 0
    ) -> TrainBatch:
        """Return examples as one sequence, packed end to end and padded up to a size.

        Rows of one size let a GPU keep the products that were found fastest for it.
        """
        found = [self[number] for number in numbers]
        lengths = [len(one.token_ids) for one in found]
        padding = max(0, size - sum(lengths))
        filled = np.concatenate([one.token_ids for one in found])
        tokens = np.pad(filled.astype(np.int64), (0, padding), constant_values=self.pad_token_id)
        labels = np.full(len(tokens), IGNORE_INDEX, np.int64)
        ends = np.cumsum([len(one.token_ids) for one in found])
        for one, end in zip(found, ends.tolist(), strict=True):
            first = end - len(one.token_ids)
            inside = np.flatnonzero(one.loss_mask[1:])
            labels[first + inside] = one.token_ids[1 + inside]
        documents = PackedSequences.from_lengths([[*lengths, padding] if padding else lengths])
        positions = documents.positions(1, len(tokens))
        note = SequenceInfo(
            len(found) + bool(padding), documents.max_length, int((labels != IGNORE_INDEX).sum()),
            len(filled), tuple(numbers),
        )  # fmt: skip
        tokens_BT, labels_BT = torch.from_numpy(tokens)[None], torch.from_numpy(labels)[None]
        return TrainBatch(0, tokens_BT, labels_BT, positions, documents, (note,)).to(device)

    def group_by_tokens(self, numbers: Sequence[int], most: int) -> Iterator[list[int]]:
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


class TrainedPositions(NamedTuple):
    """Where a batch is trained, known without asking its device."""

    positions: Tensor
    """Among the B·T of the batch, int64: those whose next token is trained."""
    example_indices: Tensor
    """Which of the batch's examples each belongs to, by its place among them."""
    target_indices: Tensor
    """Place, among the tokens of all sets, of the token that comes next."""


def find_trained_positions(examples: ExampleIndex, batch: TrainBatch) -> TrainedPositions:
    """Return the positions of a batch that are trained, example by example."""
    length, place = batch.tokens_BT.shape[1], 0
    positions, owners, tokens = list[Ints](), list[Ints](), list[Ints]()
    for row, note in enumerate(batch.sequences):
        at = row * length
        for number in note.examples:
            trained = examples[number].loss_mask
            inside = np.flatnonzero(trained[1:])
            positions.append(at + inside)
            owners.append(np.full(len(inside), place))
            tokens.append(examples.first_token(number) + 1 + inside)
            at += len(trained)
            place += 1
    device = batch.tokens_BT.device
    found = (np.concatenate(one) for one in (positions, owners, tokens))
    return TrainedPositions(*(torch.from_numpy(one.astype(np.int64)).to(device) for one in found))


def list_example_ids(batch: TrainBatch) -> list[int]:
    """Return the examples of a batch in order."""
    return [number for note in batch.sequences for number in note.examples]


def map_example_documents(batch: TrainBatch) -> Tensor:
    """Return the document, among the batch's, that each of its examples is, int64."""
    found, before = list[int](), 0
    for note in batch.sequences:
        found += range(before, before + len(note.examples))
        before += note.documents
    return torch.tensor(found, dtype=torch.int64, device=batch.tokens_BT.device)
