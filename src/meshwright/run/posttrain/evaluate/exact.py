"""Answers compared as text: where in it the answer is, and which differences do not count."""

import re
from collections.abc import Sequence
from typing import Literal

from meshwright.errors import InputError, Problem

Normal = Literal["strip", "words"]
"""What is made equal: spaces around the answer, or case, punctuation at its ends and spaces."""
_EDGES = " \t\n.,;:!?\"'`*"


def is_right(text: str, answers: Sequence[str], *, pattern: str = "", normal: Normal) -> bool:
    """Tell whether a text is one of the right answers.

    Args:
        text: What the model wrote.
        answers: What is right.
        pattern: A regular expression: its last match is the answer, or the match's first group.
        normal: What does not count.
    """
    found = taken(text, pattern)
    if found is None:
        return False
    return normalised(found, normal) in {normalised(one, normal) for one in answers}


def taken(text: str, pattern: str) -> str | None:
    """Return the answer within a text; None where there is none."""
    if not pattern:
        return text
    try:
        matches = list(re.finditer(pattern, text))
    except re.error as error:
        what = f"{pattern!r} is no regular expression: {error}"
        raise InputError([Problem("pattern", what, r"use such as '#### (\S+)'")]) from None
    if not matches:
        return None
    last = matches[-1]
    return last.group(1) if last.re.groups else last.group()


def normalised(text: str, normal: Normal) -> str:
    """Return a text without what does not count."""
    if normal == "strip":
        return text.strip()
    return " ".join(text.casefold().strip(_EDGES).split())
