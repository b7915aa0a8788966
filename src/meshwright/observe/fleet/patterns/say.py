"""How detectors word numbers, so that evidence reads alike everywhere."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from meshwright.observe.fleet.patterns.arrays import Flags, Floats
from meshwright.observe.fleet.patterns.registry import Hit, bound

MOST_NAMES = 5


def share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.0f} %" if value >= 0.0995 or value <= 0 else f"{100 * value:.2g} %"


def hours(value: float) -> str:
    """GPU-hours, or hours."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def lasted(seconds: float) -> str:
    """A length of time in the unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size * (2 if unit == "days" else 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def many_gpus(number: float) -> str:
    """A number of GPUs, which may be parts of one."""
    text = f"{number:,.0f}" if number == round(number) else f"{number:g}"
    return f"{text} GPU" if number == 1 else f"{text} GPUs"


def gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{value / 2**30:,.3g} GiB"


def some(names: Iterable[str]) -> str:
    """A few of many names."""
    found = sorted(set(names))
    more = len(found) - MOST_NAMES
    return ", ".join(found[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def of_jobs(
    which: Flags, cost: Floats, tell: Callable[[int], Sequence[str]],
    remedy: Callable[[int], str] | None = None,
) -> Iterator[Hit]:  # fmt: skip
    """A hit for each job chosen, with its cost; `tell` and `remedy` take its row."""
    for row in np.flatnonzero(which).tolist():
        yield Hit(
            hours=None if np.isnan(cost[row]) else float(cost[row]),
            tell=bound(lambda at: tuple(tell(at)), row),
            jobs=np.array([row]),
            remedy=remedy(row) if remedy else "",
        )
