"""Collects the spans of a simulated step column by column, words as numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.timeline import DictionaryColumn

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_WORDS = ("process", "lane", "kind", "name", "collective", "group", "extra")
_NUMBERS = ("stage", "microbatch", "layer", "bytes", "flow_out", "flow_in")
_MISSING = -1


class SpanTable:
    """Spans while they are being collected."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {column: {} for column in _WORDS}
        self._start: list[Ints] = []
        self._end: list[Ints] = []
        self._parts: dict[str, list[npt.NDArray[Any]]] = {
            column: [] for column in (*_WORDS, *_NUMBERS)
        }

    def encode(self, column: str, words: Sequence[str]) -> Ints:
        """Return the numbers of some words; an empty word is no value."""
        known = self._known[column]
        return np.array(
            [known.setdefault(word, len(known)) if word else _MISSING for word in words],
            dtype=np.int64,
        )

    def add(self, start_s: Floats, end_s: Floats, **columns: Any) -> None:
        """Add spans: a column is one word or number for all, or numbers (of words) by span.

        What is left out has no value.
        """
        # Both ends are rounded, not the length, so that spans which touch still do.
        self._start.append(np.rint(start_s * 1e9).astype(np.int64))
        self._end.append(np.rint(end_s * 1e9).astype(np.int64))
        for column, parts in self._parts.items():
            value = columns.get(column, _MISSING)
            if isinstance(value, str):
                value = self.encode(column, [value])[0]
            parts.append(np.broadcast_to(np.asarray(value), start_s.shape))

    def to_columns(self, rank_of_stage: Ints) -> dict[str, object]:
        """Return all spans as the columns of a timeline."""
        joined = {column: np.concatenate(parts) for column, parts in self._parts.items()}
        start = np.concatenate(self._start)
        found: dict[str, object] = {
            "rank": rank_of_stage[joined["stage"]],
            "start_ns": start,
            "duration_ns": np.concatenate(self._end) - start,
        }
        for column, values in joined.items():
            words = self._known.get(column)
            found[column] = values if words is None else DictionaryColumn(values, list(words))
        return found
