"""Answers compared as text: where in it the answer is, and which differences do not count."""

import re
from collections.abc import Sequence
from typing import Literal

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.evaluation.final_answer import extract_final_number, strip_reasoning

Normalization = Literal["strip", "words", "number"]
"""What is made equal: spaces around the answer; case, punctuation at its ends and spaces; or
everything but the number that it comes to."""
_EDGES = " \t\n.,;:!?\"'`*"


def matches_answer(
    text: str, answers: Sequence[str], *, pattern: str = "", normalization: Normalization
) -> bool:
    """Tell whether a text is one of the right answers.

    Args:
        text: What the model wrote.
        answers: What is right.
        pattern: A regular expression: its last match is the answer, or the match's first group.
            Without one the answer is all of the text, or what follows its thoughts.
        normalization: What does not count.
    """
    found = extract_answer(text, pattern)
    if found is None:
        return False
    if normalization == "number":
        number = extract_final_number(found)
        return number is not None and number in {extract_final_number(one) for one in answers}
    return normalize_text(found, normalization) in {
        normalize_text(one, normalization) for one in answers
    }


def extract_answer(text: str, pattern: str) -> str | None:
    """Return the answer within a text; None where there is none."""
    if not pattern:
        return strip_reasoning(text)
    try:
        matches = list(re.finditer(pattern, text))
    except re.error as error:
        what = f"{pattern!r} is no regular expression: {error}"
        raise InputError([Problem("pattern", what, r"use such as '#### (\S+)'")]) from None
    if not matches:
        return None
    last = matches[-1]
    return last.group(1) if last.re.groups else last.group()


def normalize_text(text: str, normalization: Normalization) -> str:
    """Return a text without what does not count, where texts are compared."""
    if normalization == "strip":
        return text.strip()
    return " ".join(text.casefold().strip(_EDGES).split())
