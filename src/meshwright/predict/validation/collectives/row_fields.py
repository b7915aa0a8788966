"""Take single fields out of a row: counts, sizes and words, or the reason why there are none."""

import math
from typing import Any, TypeGuard

from meshwright.predict.validation.collectives.sweep_rows import Row

MAX_GPUS = 1_000_000
"""More than any cluster has; a larger figure is taken for a mistake."""


class UnreadableRowError(Exception):
    """A row that does not say what it was measured on, or says something that cannot be."""


def read_count(row: Row, name: str) -> int | None:
    """Return a whole number from 1 up; None where the row has none."""
    value = row.get(name)
    if value is None:
        return None
    if _is_number(value) and value == int(value) and 1 <= value <= MAX_GPUS:
        return int(value)
    raise UnreadableRowError(
        f"{name} is {value!r:.40}: a whole number from 1 to {MAX_GPUS:,} is needed"
    )


def read_size_bytes(row: Row) -> float:
    """Return the message size."""
    value = row.get("size_bytes")
    if value is None:
        raise UnreadableRowError("no message size is given")
    if _is_number(value) and 0 < value < 1e18:
        return float(value)
    raise UnreadableRowError(f"size_bytes is {value!r:.40}: a positive number is needed")


def read_measurement(row: Row, name: str) -> float | None:
    """Return a measured figure; None where there is none that could be one."""
    value = row.get(name)
    return float(value) if _is_number(value) and 1e-9 < value < 1e15 else None


def read_text(row: Row, name: str) -> str:
    """Return what a row says in words; empty where it says nothing."""
    value = row.get(name)
    return "" if value is None else str(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
