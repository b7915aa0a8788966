"""Which documents of a corpus a run reads: all, those to train on, or those held out.

Held out is every n-th document by number, so it is spread over the whole corpus, is the same for
every seed, and needs no list: place j of the rest is document j + ⌊j / (n − 1)⌋.
"""

from typing import Literal, NamedTuple

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.corpus.corpus import Corpus, Ints

SplitName = Literal["train", "validation"]
_CHUNK = 1 << 20


class DocumentSplit(NamedTuple):
    """Documents of a corpus, numbered by their place among those selected."""

    corpus: Corpus
    num_documents: int
    num_tokens: int
    holdout_interval: int
    """Held out is one document in so many; 0 where none is."""
    split: SplitName

    @property
    def name(self) -> str:
        """What two runs must agree on to read the same documents."""
        split = self.split if self.holdout_interval else "all"
        return f"{self.corpus.fingerprint}/{split}/{self.holdout_interval}"

    def get_document_spans(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the first token, and the number of tokens, of the documents at these places."""
        return self.corpus.get_document_spans(_numbers(places, self.holdout_interval, self.split))


def select_split(corpus: Corpus, split: SplitName = "train", share: float = 0.0) -> DocumentSplit:
    """Select the documents of a split, where `share` of all are held out."""
    if not corpus.num_documents or not corpus.num_tokens:
        raise InputError([Problem(corpus.name, "holds no tokens", "tokenize some text")])
    if not share:
        return DocumentSplit(corpus, corpus.num_documents, corpus.num_tokens, 0, split)
    every = max(2, round(1 / share))
    held = corpus.num_documents // every
    if not held:
        what = f"has {corpus.num_documents:,} documents, of which a share of {share:g} is none"
        fix = f"hold out {1 / corpus.num_documents:.2g} or more, or give validation_sources"
        raise InputError([Problem(corpus.name, what, fix)])
    held_tokens = _tokens(corpus, held, every)
    if split == "validation":
        return DocumentSplit(corpus, held, held_tokens, every, split)
    rest = corpus.num_documents - held
    return DocumentSplit(corpus, rest, corpus.num_tokens - held_tokens, every, split)


def _numbers(places: Ints, every: int, split: SplitName) -> Ints:
    if not every:
        return places
    if split == "validation":
        return places * every + (every - 1)
    return places + places // (every - 1)


def _tokens(corpus: Corpus, held: int, every: int) -> int:
    """Count the held-out tokens."""
    total = 0
    for first in range(0, held, _CHUNK):
        places = np.arange(first, min(first + _CHUNK, held))
        total += int(corpus.get_document_spans(_numbers(places, every, "validation"))[1].sum())
    return total
