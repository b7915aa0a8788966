"""A batch in words: the documents of its sequences, as a person would read them."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.data.batches import Batches
from meshwright.run.train.data.shards import is_shards
from meshwright.run.train.data.tokenizer import kept_tokenizer, open_tokenizer

Reader = Callable[[list[int]], str]
"""Turns ids into text."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One document, or a piece of one, in a sequence."""

    sequence: int
    """Which sequence of the batch."""
    first: int
    """Its first position."""
    tokens: int
    """Its positions."""
    targets: int
    """Positions of it that are trained."""
    text: str


def reader_of(batches: Batches, tokenizer: str | None) -> Reader:
    """Return what reads the tokens of a source: its own tokenizer, the one named, or bare ids."""
    if batches.vocabulary is not None and tokenizer is None:
        place = Path(batches.streams[0].corpus.name)
        if batches.vocabulary.name == "bytes" or is_shards(place):
            return kept_tokenizer(place, batches.vocabulary).decode
    if tokenizer is not None:
        return open_tokenizer(tokenizer).decode
    return lambda ids: " ".join(map(str, ids))


def documents_of(batch: Batch, reader: Reader) -> list[Shown]:
    """Return the documents of a batch; padding is left out."""
    length = batch.tokens_BT.shape[1]
    tokens, labels = batch.tokens_BT.flatten().tolist(), batch.labels_BT.flatten().tolist()
    found = []
    for first, after in _spans(batch):
        row, place = divmod(first, length)
        end = min(after, row * length + batch.sequences[row].filled)
        if end <= first:
            continue
        found.append(
            Shown(
                sequence=row,
                first=place,
                tokens=end - first,
                targets=sum(label != IGNORED for label in labels[first:end]),
                text=reader(tokens[first:end]),
            )
        )
    return found


def _spans(batch: Batch) -> Iterator[tuple[int, int]]:
    count, length = batch.tokens_BT.shape
    if batch.documents is None:
        bounds = [row * length for row in range(count + 1)]
    else:
        bounds = batch.documents.starts.tolist()
    return pairwise(bounds)
