"""`Corpus`: tokenised documents on disk, memory-mapped, whatever format they lie in.

A corpus is a row of tokens in one or several files and, for each document, where it starts in that
row and how long it is. A document never crosses files. Reading copies from the page cache; nothing
is kept in memory. Knows no text, no order and no sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.train.data.vocabulary import Vocabulary

Ints = NDArray[np.int64]
Tokens = NDArray[Any]
"""Token ids, uint16 or int32."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents."""

    name: str
    """Where it lies, for messages."""
    kind: str
    """`shards`, our own format, or `megatron`."""
    documents: int
    tokens: int
    dtype: np.dtype[Any]
    parts: tuple[Tokens, ...]
    """The tokens, file by file."""
    firsts: Ints
    """Number of the first token of each file."""
    index: Callable[[Ints], tuple[Ints, Ints]]
    """Start and length of documents, as the files say it."""
    fingerprint: str
    """Hash that changes with the content."""
    vocabulary: Vocabulary | None = None
    """What the ids mean, where the files say it."""
    text_bytes: int = 0
    """UTF-8 bytes of the text it was made from; 0 where the files do not say it."""

    def spans(self, documents: Ints) -> tuple[Ints, Ints]:
        """Return the number of the first token, and of tokens, of each document."""
        starts, lengths = self.index(documents)
        if documents.size and (
            lengths.min() < 0 or starts.min() < 0 or (starts + lengths).max() > self.tokens
        ):
            bad = (lengths < 0) | (starts < 0) | (starts + lengths > self.tokens)
            document = int(documents[np.flatnonzero(bad)[0]])
            what = f"the index puts document {document:,} outside of the {self.tokens:,} tokens"
            raise DamagedFile([Problem(self.name, what, "tokenise the text again")])
        return starts, lengths

    def copy(self, starts: Ints, lengths: Ints, out: Tokens, places: Ints) -> None:
        """Copy spans of tokens into a flat array, each to its place."""
        if len(self.parts) == 1:
            (part,) = self.parts
            pieces = zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True)
            for start, length, place in pieces:
                out[place : place + length] = part[start : start + length]
            return
        files = np.searchsorted(self.firsts, starts, side="right") - 1
        inside = starts - self.firsts[files]
        rows = (files.tolist(), inside.tolist(), lengths.tolist(), places.tolist())
        for file, start, length, place in zip(*rows, strict=True):
            out[place : place + length] = self.parts[file][start : start + length]

    def document(self, number: int) -> Tokens:
        """Return the tokens of one document."""
        if not 0 <= number < self.documents:
            what = f"there is no document {number:,} among {self.documents:,}"
            raise InputError([Problem(self.name, what, f"use 0 to {self.documents - 1:,}")])
        starts, lengths = self.spans(np.array([number]))
        out: Tokens = np.empty(int(lengths[0]), self.dtype)
        self.copy(starts, lengths, out, np.zeros(1, np.int64))
        return out
