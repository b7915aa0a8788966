"""Verifiers of sorted digits; they import nothing, so that their process starts at once.

A job has `digits` as they were asked for, the tokens of the `answer`, and the token that is its
`end`. Digits are their own tokens.
"""

from collections.abc import Mapping
from typing import Any


def verify_sorted(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return 1 where the answer is the sorted digits and the end, and nothing else; otherwise 0."""
    wanted = [*sorted(job["digits"]), job["end"]]
    if job["answer"] == wanted:
        return 1.0, "sorted"
    return 0.0, f"wanted {wanted}, got {job['answer']}"


def sorted_fraction(job: Mapping[str, Any]) -> tuple[float, str]:
    """Return the share of places that are right, of as many as are wanted or given."""
    wanted, answer = [*sorted(job["digits"]), job["end"]], job["answer"]
    right = sum(one == other for one, other in zip(wanted, answer, strict=False))
    places = max(len(wanted), len(answer))
    return right / places, f"{right} of {places} places"
