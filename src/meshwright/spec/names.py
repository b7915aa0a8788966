"""Names that people type: the nearest known ones, and the fix and problem that say so."""

from collections.abc import Iterable
from difflib import SequenceMatcher

from meshwright.errors import Problem

CLOSE = 0.6
"""Likeness from which a known name is worth suggesting."""
SHORT_LIST = 20
"""So many known names are listed in full."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names closest to `name`, best first."""
    wanted = name.lower()
    scored = [(_likeness(wanted, candidate.lower()), candidate) for candidate in known]
    close = sorted((-score, candidate) for score, candidate in scored if score >= CLOSE)
    return [candidate for _, candidate in close[:most]]


def _likeness(wanted: str, candidate: str) -> float:
    # People type the start of a long name ("h200" for h200-141g-sxm) or a word inside it, so a
    # name is also compared by its beginning, at a small discount.
    whole = _ratio(wanted, candidate)
    start = _ratio(wanted, candidate[: len(wanted)])
    inside = 1.0 if len(wanted) > 2 and wanted in candidate else 0.0
    return max(whole, 0.95 * start, 0.9 * inside)


def _ratio(wanted: str, candidate: str) -> float:
    """Return how much of two texts matches; 0 where it cannot be close, which is seen sooner."""
    matcher = SequenceMatcher(None, wanted, candidate)
    if matcher.real_quick_ratio() < CLOSE or matcher.quick_ratio() < CLOSE:
        return 0.0
    return matcher.ratio()


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return the fix for a name that is not known: the closest ones, or what there is.

    What is no text is close to nothing, so it gets the list.
    """
    names = list(known)
    close = nearest(name, names) if isinstance(name, str) else []
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if not names:
        return "leave it out: there is none to choose"
    if len(names) <= SHORT_LIST:
        return "use one of " + ", ".join(names)
    return f"there are {len(names)}, such as " + ", ".join(names[:5])


def unknown_name(kind: str, name: str, known: Iterable[str], where: str = "") -> Problem:
    """Say that `name` is not one of `known`, with the closest matches as the fix."""
    what = f"there is no {kind} named {name!r}"
    return Problem(where, what, suggestion(name, sorted(known)))
