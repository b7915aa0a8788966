"""Verifiers of answers as text: exact ones, numbers, choices, and the form of an answer.

They are what `exact` and `final` judge, in processes with bounds: a regular expression may take
for ever on what a model wrote.
"""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.run.posttrain.evaluate.exact import is_right
from meshwright.run.posttrain.evaluate.final import choice_of, number_of

_SHOWN = 80
"""Characters of an answer in a reason."""


def exact(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `text` is one of the `answers`, by `pattern` and `normal`; otherwise 0."""
    answers, pattern, normal = (job[name] for name in ("answers", "pattern", "normal"))
    right = is_right(job["text"], answers, pattern=pattern, normal=normal)
    return float(right), "right" if right else f"wanted {answers[0][:_SHOWN]!r}"


def number(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `text` comes to the number of one of the `answers`; otherwise 0.

    With `marked` a number counts only where the text marks it as its end.
    """
    found = number_of(job["text"], only_marked=job["marked"])
    if found is None:
        return 0.0, "comes to no number"
    wanted = [number_of(each) for each in job["answers"]]
    if found in wanted:
        return 1.0, f"comes to {found}"
    return 0.0, f"comes to {found}, wanted {wanted[0]}"[:_SHOWN]


def choice(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `text` comes to the `right` one of the `choices`; otherwise 0."""
    found = choice_of(job["text"], job["choices"])
    if found is None:
        return 0.0, "comes to none of the choices"
    return float(found == job["right"]), f"comes to choice {found}"


def form(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where a `pattern` matches all of a `text` but spaces around it; otherwise 0."""
    found = re.fullmatch(job["pattern"], job["text"].strip(), re.DOTALL)
    return (0.0, "has another form") if found is None else (1.0, "has the form")
