"""`Corpus`: tokenized documents on disk, memory-mapped, whatever format they lie in.

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
from meshwright.run.train.data.corpus.corpus_verification import CorpusCheck
from meshwright.run.train.data.corpus.vocabulary import Vocabulary

Ints = NDArray[np.int64]
Tokens = NDArray[Any]
"""Token ids, uint16 or int32."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenized documents."""

    name: str
    """Where it lies, for messages."""
    format: str
    """`shards`, our own format, or `megatron`."""
    num_documents: int
    num_tokens: int
    dtype: np.dtype[Any]
    token_arrays: tuple[Tokens, ...]
    """The tokens, file by file."""
    array_offsets: Ints
    """Number of the first token of each file."""
    lookup_documents: Callable[[Ints], tuple[Ints, Ints]]
    """Start and length of documents, as the files say it."""
    fingerprint: str
    """Hash that changes with the content."""
    vocabulary: Vocabulary | None = None
    """What the ids mean, where the files say it."""
    text_bytes: int = 0
    """UTF-8 bytes of the text it was made from; 0 where the files do not say it."""
    checks: tuple[CorpusCheck, ...] = ()
    """What compares its files with their checksums."""

    def get_document_spans(self, documents: Ints) -> tuple[Ints, Ints]:
        """Return the number of the first token, and of tokens, of each document."""
        starts, lengths = self.lookup_documents(documents)
        if documents.size and (
            lengths.min() < 0 or starts.min() < 0 or (starts + lengths).max() > self.num_tokens
        ):
            bad = (lengths < 0) | (starts < 0) | (starts + lengths > self.num_tokens)
            document = int(documents[np.flatnonzero(bad)[0]])
            what = f"the index puts document {document:,} outside of the {self.num_tokens:,} tokens"
            raise DamagedFile([Problem(self.name, what, "tokenize the text again")])
        return starts, lengths

    def copy_spans(self, starts: Ints, lengths: Ints, out: Tokens, places: Ints) -> None:
        """Copy spans of tokens into a flat array, each to its place."""
        if len(self.token_arrays) == 1:
            (part,) = self.token_arrays
            pieces = zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True)
            for start, length, place in pieces:
                out[place : place + length] = part[start : start + length]
            return
        files = np.searchsorted(self.array_offsets, starts, side="right") - 1
        inside = starts - self.array_offsets[files]
        rows = (files.tolist(), inside.tolist(), lengths.tolist(), places.tolist())
        for file, start, length, place in zip(*rows, strict=True):
            out[place : place + length] = self.token_arrays[file][start : start + length]

    def read_document(self, number: int) -> Tokens:
        """Return the tokens of one document."""
        if not 0 <= number < self.num_documents:
            what = f"there is no document {number:,} among {self.num_documents:,}"
            raise InputError([Problem(self.name, what, f"use 0 to {self.num_documents - 1:,}")])
        starts, lengths = self.get_document_spans(np.array([number]))
        out: Tokens = np.empty(int(lengths[0]), self.dtype)
        self.copy_spans(starts, lengths, out, np.zeros(1, np.int64))
        return out
