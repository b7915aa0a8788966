"""Verifiers of answers as text: exact ones, numbers, choices, and the form of an answer.

`verify_exact` and its siblings run in processes with bounds: a regular expression may
take for ever on what a model wrote.
"""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.run.posttrain.evaluation.exact_match import matches_answer
from meshwright.run.posttrain.evaluation.final_answer import (
    extract_final_choice,
    extract_final_number,
)

_SHOWN = 80
"""Characters of an answer in a reason."""


def verify_exact(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `text` is one of the `answers`, by `pattern` and `normalization`."""
    answers = job["answers"]
    right = matches_answer(
        job["text"], answers, pattern=job["pattern"], normalization=job["normalization"]
    )
    return float(right), "right" if right else f"wanted {answers[0][:_SHOWN]!r}"


def verify_number(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `text` comes to the number of one of the `answers`; otherwise 0.

    With `require_marker` a number counts only where the text marks it as its end.
    """
    found = extract_final_number(job["text"], only_marked=job["require_marker"])
    if found is None:
        return 0.0, "comes to no number"
    wanted = [extract_final_number(each) for each in job["answers"]]
    if found in wanted:
        return 1.0, f"comes to {found}"
    return 0.0, f"comes to {found}, wanted {wanted[0]}"[:_SHOWN]


def verify_choice(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `text` comes to the `right` one of the `choices`; otherwise 0."""
    found = extract_final_choice(job["text"], job["choices"])
    if found is None:
        return 0.0, "comes to none of the choices"
    return float(found == job["right"]), f"comes to choice {found}"


def verify_format(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `pattern` matches all of a `text` but spaces around it; otherwise 0."""
    found = re.fullmatch(job["pattern"], job["text"].strip(), re.DOTALL)
    return (0.0, "has another form") if found is None else (1.0, "has the form")
