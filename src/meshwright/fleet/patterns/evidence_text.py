"""How detectors word numbers, so that evidence reads alike everywhere."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from meshwright.fleet.patterns.data.group_math import Flags, Floats
from meshwright.fleet.patterns.fleet_pattern import FleetDetection, defer_evidence

MAX_NAMES = 5


def format_percent(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.0f} %" if value >= 0.0995 or value <= 0 else f"{100 * value:.2g} %"


def format_hours(value: float) -> str:
    """GPU-hours, or hours."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """A length of time in the unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size * (2 if unit == "days" else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def format_gpus(number: float) -> str:
    """A number of GPUs, which may be parts of one."""
    text = f"{number:,.0f}" if number == round(number) else f"{number:g}"
    return f"{text} GPU" if number == 1 else f"{text} GPUs"


def format_gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{value / 2**30:,.3g} GiB"


def format_names(names: Iterable[str]) -> str:
    """A few of many names."""
    found = sorted(set(names))
    more = len(found) - MAX_NAMES
    return ", ".join(found[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def make_job_detections(
    which: Flags, cost: Floats, tell: Callable[[int], Sequence[str]],
    remedy: Callable[[int], str] | None = None,
) -> Iterator[FleetDetection]:  # fmt: skip
    """A hit for each job chosen, with its cost; `tell` and `remedy` take its row."""
    for row in np.flatnonzero(which).tolist():
        yield FleetDetection(
            gpu_hours=None if np.isnan(cost[row]) else float(cost[row]),
            evidence=defer_evidence(lambda at: tuple(tell(at)), row),
            jobs=np.array([row]),
            remedy=remedy(row) if remedy else "",
        )
