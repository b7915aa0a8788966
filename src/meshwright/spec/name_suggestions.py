"""Names that people type: the nearest known ones, and the fix and problem that say so."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

from meshwright.errors import Problem

MIN_SIMILARITY = 0.65
"""Known names less similar than this are not suggested: a wrong hint is worse than none."""
_LONGEST_NAME = 200
"""A longer text is close to no name."""
MAX_LISTED_NAMES = 20
"""So many known names are listed in full."""


def find_closest_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names closest to `name`, best first."""
    if len(name) > _LONGEST_NAME:
        return []
    wanted = name.lower()
    scored = [(_likeness(wanted, candidate.lower()), candidate) for candidate in known]
    close = sorted((-score, candidate) for score, candidate in scored if score >= MIN_SIMILARITY)
    return [candidate for _, candidate in close[:most]]


def _likeness(wanted: str, candidate: str) -> float:
    # People type the start of a long name ("h200" for h200-141g-sxm) or of a word inside it, so a
    # name is also compared by its beginning, at a small discount.
    whole = _ratio(wanted, candidate)
    start = _ratio(wanted, candidate[: len(wanted)])
    dashed = candidate.replace("_", "-")
    inside = 1.0 if len(wanted) > 2 and re.search(rf"\b{re.escape(wanted)}", dashed) else 0.0
    return max(whole, 0.95 * start, 0.9 * inside)


def _ratio(wanted: str, candidate: str) -> float:
    """Return how much of two texts matches; 0 where it cannot be close, which is seen sooner."""
    matcher = SequenceMatcher(None, wanted, candidate)
    if matcher.real_quick_ratio() < MIN_SIMILARITY or matcher.quick_ratio() < MIN_SIMILARITY:
        return 0.0
    return matcher.ratio()


def format_suggestion(name: object, known: Iterable[str]) -> str:
    """Return the fix for a name that is not known: the closest ones, or what there is.

    What is no text is close to nothing, so it gets the list.
    """
    names = list(known)
    close = find_closest_names(name, names) if isinstance(name, str) else []
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if not names:
        return "leave it out: there is none to choose"
    if len(names) <= MAX_LISTED_NAMES:
        return "use one of " + ", ".join(names)
    return f"there are {len(names)}, such as " + ", ".join(names[:5])


def build_unknown_name_problem(
    kind: str, name: str, known: Iterable[str], where: str = ""
) -> Problem:
    """Say that `name` is not one of `known`, with the closest matches as the fix."""
    what = f"there is no {kind} named {name!r}"
    return Problem(where, what, format_suggestion(name, sorted(known)))
