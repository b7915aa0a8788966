"""Answers compared as text: where in it the answer is, and which differences do not count."""

import re
from collections.abc import Sequence
from typing import Literal

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.evaluate.final import number_of, spoken

Normal = Literal["strip", "words", "number"]
"""What is made equal: spaces around the answer; case, punctuation at its ends and spaces; or
everything but the number that it comes to."""
_EDGES = " \t\n.,;:!?\"'`*"


def is_right(text: str, answers: Sequence[str], *, pattern: str = "", normal: Normal) -> bool:
    """Tell whether a text is one of the right answers.

    Args:
        text: What the model wrote.
        answers: What is right.
        pattern: A regular expression: its last match is the answer, or the match's first group.
            Without one the answer is all of the text, or what follows its thoughts.
        normal: What does not count.
    """
    found = taken(text, pattern)
    if found is None:
        return False
    if normal == "number":
        number = number_of(found)
        return number is not None and number in {number_of(one) for one in answers}
    return normalised(found, normal) in {normalised(one, normal) for one in answers}


def taken(text: str, pattern: str) -> str | None:
    """Return the answer within a text; None where there is none."""
    if not pattern:
        return spoken(text)
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
    """Return a text without what does not count, where texts are compared."""
    if normal == "strip":
        return text.strip()
    return " ".join(text.casefold().strip(_EDGES).split())
