"""`TokenSpans`: the spans of tokens that make up sequences, and sequences of one document each.

A sequence of T positions is laid out in a row of T + 1 tokens: position t is trained to predict
token t + 1 of its row. A piece is one token longer than the positions it fills where the document
goes on, since the next token is then known.
"""

from typing import NamedTuple, Protocol

import numpy as np

from meshwright.run.train.data.corpus.corpus import Ints
from meshwright.run.train.data.document_split import DocumentSplit


class TokenSpans(NamedTuple):
    """Spans of tokens, in the order in which they fill rows."""

    row: Ints
    """Row that each fills, never falling."""
    start: Ints
    """Its first token in the corpus."""
    length: Ints
    """Its tokens, at least one."""


class SequencePacking(Protocol):
    """A way to cut documents into sequences."""

    sequences: int
    """Sequences of one epoch."""
    max_documents: int
    """Documents in one sequence, at most."""

    def get_spans(self, epoch: int, numbers: Ints) -> TokenSpans:
        """Return the pieces of these sequences of an epoch, one row for each."""


class NoPacking:
    """Packing `none`: a document to each sequence, cut where it is longer."""

    max_documents = 1

    def __init__(self, selection: DocumentSplit, length: int) -> None:
        self.sequences = selection.num_documents
        self._selection = selection
        self._row_tokens = length + 1

    def get_spans(self, epoch: int, numbers: Ints) -> TokenSpans:  # noqa: ARG002 - the same in each
        """Return the beginning of each document."""
        starts, lengths = self._selection.get_document_spans(numbers)
        some = np.flatnonzero(lengths)
        return TokenSpans(some, starts[some], np.minimum(lengths[some], self._row_tokens))
