"""Amounts and times as Kubernetes writes them: `500m`, `64Gi`, `2025-06-15T16:00:00Z`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_ENDINGS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
    "Ei": 2.0**60,
}  # fmt: skip


def parse_quantity(text: object) -> float | None:
    """Return the number that a quantity stands for; None where it is none."""
    if isinstance(text, int | float):
        return float(text)
    if not isinstance(text, str):
        return None
    number = text.strip()
    ending = next((each for each in sorted(_ENDINGS, key=len, reverse=True)
                   if each and number.endswith(each)), "")  # fmt: skip
    try:
        return float(number.removesuffix(ending)) * _ENDINGS[ending]
    except ValueError:
        return None


def parse_time(text: object) -> float | None:
    """Return a time in seconds since 1970; None where there is none."""
    if isinstance(text, datetime):
        return (text if text.tzinfo else text.replace(tzinfo=UTC)).timestamp()
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def get_path(found: Mapping[str, Any] | None, *names: str) -> Any:
    """Return what lies at the end of a path of names; None where it breaks off."""
    at: Any = found
    for name in names:
        if not isinstance(at, Mapping):
            return None
        at = at.get(name)
    return at


def get_mapping(found: Mapping[str, Any] | None, *names: str) -> Mapping[str, Any]:
    """Return the mapping at the end of a path of names; an empty one where there is none."""
    at = get_path(found, *names)
    return at if isinstance(at, Mapping) else {}


def get_list(found: Mapping[str, Any] | None, *names: str) -> list[Mapping[str, Any]]:
    """Return the mappings listed at the end of a path of names."""
    at = get_path(found, *names)
    return [each for each in at if isinstance(each, Mapping)] if isinstance(at, list) else []
