"""A batch in words: the documents of its sequences, as a person would read them."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.data.batch_dataset import BatchDataset
from meshwright.run.train.data.corpus.token_shards import is_token_shards
from meshwright.run.train.data.tokenization.tokenizer import open_saved_tokenizer, open_tokenizer

TokenDecoder = Callable[[list[int]], str]
"""Turns ids into text."""


class DocumentPreview(msgspec.Struct, frozen=True, kw_only=True):
    """One document, or a piece of one, in a sequence."""

    sequence: int
    """Which sequence of the batch."""
    first_token: int
    """Its first position."""
    num_tokens: int
    """Its positions."""
    num_targets: int
    """Positions of it that are trained."""
    text: str


def make_token_decoder(batches: BatchDataset, tokenizer: str | None) -> TokenDecoder:
    """Return what reads the tokens of a source: its own tokenizer, the one named, or bare ids."""
    if batches.vocabulary is not None and tokenizer is None:
        place = Path(batches.streams[0].corpus.name)
        if batches.vocabulary.name == "bytes" or is_token_shards(place):
            return open_saved_tokenizer(place, batches.vocabulary).decode
    if tokenizer is not None:
        return open_tokenizer(tokenizer).decode
    return lambda ids: " ".join(map(str, ids))


def list_document_previews(batch: TrainBatch, reader: TokenDecoder) -> list[DocumentPreview]:
    """Return the documents of a batch; padding is left out."""
    length = batch.tokens_BT.shape[1]
    tokens, labels = batch.tokens_BT.flatten().tolist(), batch.labels_BT.flatten().tolist()
    found = []
    for first, after in _spans(batch):
        row, place = divmod(first, length)
        end = min(after, row * length + batch.sequences[row].num_tokens)
        if end <= first:
            continue
        found.append(
            DocumentPreview(
                sequence=row,
                first_token=place,
                num_tokens=end - first,
                num_targets=sum(label != IGNORE_INDEX for label in labels[first:end]),
                text=reader(tokens[first:end]),
            )
        )
    return found


def _spans(batch: TrainBatch) -> Iterator[tuple[int, int]]:
    count, length = batch.tokens_BT.shape
    if batch.documents is None:
        bounds = [row * length for row in range(count + 1)]
    else:
        bounds = batch.documents.cu_seqlens.tolist()
    return pairwise(bounds)
