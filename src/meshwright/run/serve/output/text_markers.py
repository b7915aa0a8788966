"""Texts that mean something, found in text that comes in pieces."""

from collections.abc import Iterable
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
