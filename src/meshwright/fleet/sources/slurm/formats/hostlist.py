"""Names of nodes as Slurm folds them, `rack[1-2]n[01-04],login1`, and the numbers of array jobs."""

import re
from collections.abc import Iterator
from itertools import product
from typing import Final

from meshwright.errors import InputError, Problem

MAX_NAMES: Final = 1_000_000
"""A list that stands for more is taken for a mistake."""
_PIECE = re.compile(r"\[([^\]]*)\]")
_NOBODY: Final = frozenset({"", "None assigned", "None", "(null)", "N/A", "n/a", "Unknown"})


def expand_hostlist(folded: str) -> list[str]:
    """Return every name that a folded list stands for, in order; none where none are assigned."""
    folded = folded.strip()
    if folded in _NOBODY:
        return []
    if "[" not in folded:
        return [name for name in folded.split(",") if name]
    names: list[str] = []
    for part in _split(folded):
        pieces = _PIECE.split(part)
        # Odd places are what stood in brackets; several brackets are every combination.
        choices = [
            list(_numbers(piece, folded)) if place % 2 else [piece]
            for place, piece in enumerate(pieces)
        ]
        names.extend("".join(choice) for choice in product(*choices))
        if len(names) > MAX_NAMES:
            raise _too_many(folded)
    return names


def expand_array(folded: str) -> list[int] | None:
    """Return the numbers of the elements `1-4,9`, `0-20:4` or `1-4%2` of an array stands for.

    Slurm cuts long lists off with three dots; of those, and of what is no list, None is returned,
    since the rest cannot be known.
    """
    text = folded.strip().strip("[]").partition("%")[0]
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if not found:
            return None
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first > MAX_NAMES:
            raise _too_many(folded)
        numbers.extend(range(first, last + 1, int(found[3] or 1) or 1))
    return numbers


def expand_indexes(folded: str) -> list[int]:
    """Return the indexes `0-2,5` stands for; none of `N/A`."""
    return (expand_array(folded) or []) if folded[:1].isdigit() else []


def _split(folded: str) -> Iterator[str]:
    """Cut at the commas that stand outside of brackets."""
    depth = start = 0
    for place, letter in enumerate(folded):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            yield folded[start:place]
            start = place + 1
    if folded[start:]:
        yield folded[start:]


def _numbers(piece: str, whole: str) -> Iterator[str]:
    for part in piece.split(","):
        first, dash, last = part.partition("-")
        if not dash:
            yield part
            continue
        if not (first.isdigit() and last.isdigit()):
            raise InputError([Problem(whole, f"[{piece}] is no range of numbers")])
        if int(last) - int(first) > MAX_NAMES:
            raise _too_many(whole)
        # Leading noughts are part of a name: 07-12 is n07, n08, …, n12.
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _too_many(folded: str) -> InputError:
    shown = folded if len(folded) < 60 else folded[:57] + "…"
    return InputError([Problem(shown, f"stands for more than {MAX_NAMES:,} names")])
