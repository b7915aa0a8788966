"""Texts that mean something, found in text that comes in pieces."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class MarkerMatch(NamedTuple):
    """One of the texts looked for, and where it is."""

    text: str
    start: int
    end: int


def find_first_marker(text: str, wanted: Iterable[str]) -> MarkerMatch | None:
    """Return what is complete first; of several that end at one place, the longest.

    So the answer does not depend on the pieces in which the text came.
    """
    best: MarkerMatch | None = None
    for each in wanted:
        at = text.find(each)
        if at < 0:
            continue
        end = at + len(each)
        if best is None or (end, at) < (best.end, best.start):
            best = MarkerMatch(each, at, end)
    return best


def count_partial_marker(text: str, wanted: Iterable[str]) -> int:
    """Return how many last characters may be the beginning of a text that is looked for."""
    most = 0
    for each in wanted:
        for length in range(min(len(each) - 1, len(text)), most, -1):
            if text.endswith(each[:length]):
                most = length
                break
    return most


class PartialMarkerTracker:
    """Counts what `count_partial_marker` counts, of a text that only grows.

    Its time is that of the text, however long the markers are (Knuth, Morris and Pratt, 1977).
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        self._markers = [(marker, _border_lengths(marker)) for marker in wanted if marker]
        self._matched = [0] * len(self._markers)
        """Characters at the end of the text that each marker begins with."""

    def feed(self, text: str) -> int:
        """Go on with text; return how many last characters may be the beginning of a marker."""
        for number, (marker, borders) in enumerate(self._markers):
            matched = self._matched[number]
            for character in text:
                while matched and marker[matched] != character:
                    matched = borders[matched - 1]
                if marker[matched] == character:
                    matched += 1
                    if matched == len(marker):
                        matched = borders[-1]
            self._matched[number] = matched
        return max(self._matched, default=0)


@lru_cache(maxsize=512)
def _border_lengths(marker: str) -> tuple[int, ...]:
    """Return for each beginning of a text how long its longest end is that is a beginning too."""
    borders, length = [0] * len(marker), 0
    for at in range(1, len(marker)):
        while length and marker[length] != marker[at]:
            length = borders[length - 1]
        length += marker[length] == marker[at]
        borders[at] = length
    return tuple(borders)
