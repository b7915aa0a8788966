"""What differs between a real model or layout and the small one, number by number."""

from collections.abc import Iterator
from typing import Any, NamedTuple


class SizeChange(NamedTuple):
    """A number of a model or layout that is smaller than the real one."""

    field: str
    original: object
    reduced: object


def diff_descriptions(where: str, before: Any, after: Any) -> Iterator[SizeChange]:
    """Walk through two descriptions and yield where they differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before | after:
            inner = f"{where}{name}" if not where or where.endswith(" ") else f"{where}.{name}"
            yield from diff_descriptions(inner, before.get(name), after.get(name))
    elif where == "blocks":
        for one, other in zip(before, after, strict=True):
            yield from diff_descriptions(f"{where}.{one['name']}", one, other)
    elif before != after:
        yield SizeChange(where, "a tower" if isinstance(before, dict) else before, after)
