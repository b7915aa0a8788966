"""How detectors word numbers and places, so that evidence reads alike everywhere."""

from collections.abc import Sequence

import numpy as np

from meshwright.observe.analyze.spans import Flags, Intervals, Ints
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import MAX_SPANS

_NAME_LETTERS = 70


def took(time_ns: float) -> str:
    """A time with three digits, in the unit that suits it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if time_ns >= size:
            value = time_ns / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{time_ns:.0f} ns"


def share(part: float, whole: float) -> str:
    """A part in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def short(name: str) -> str:
    """A name cut to one line."""
    return name if len(name) <= _NAME_LETTERS else f"{name[: _NAME_LETTERS - 1]}…"


def per_step(rank: Rank, number: float) -> str:
    """A count per step where steps are known, else in all."""
    if rank.num_steps is None:
        return f"{number:.0f}"
    return f"{number / rank.num_steps:.0f} per step"


def most_time(rank: Rank, which: Flags, number: int = 3) -> tuple[str, ...]:
    """The kernels among these that take longest: time, count, name."""
    if not which.any():
        return ()
    names = rank.spans.name[which]
    total = np.bincount(names, rank.length[which])
    count = np.bincount(names)
    longest = np.argsort(-total, kind="stable")[:number]
    return tuple(
        f"{took(total[code])} in {count[code]} x {short(rank.spans.names[code])}"
        for code in longest.tolist()
        if count[code]
    )


def longest(start: Ints, end: Ints) -> tuple[tuple[int, int], ...]:
    """The longest of these spans."""
    order = np.argsort(start - end, kind="stable")[:MAX_SPANS]
    return tuple((int(start[at]), int(end[at])) for at in order.tolist())


def longest_of(intervals: Intervals) -> tuple[tuple[int, int], ...]:
    """The longest of these intervals."""
    return longest(intervals.start, intervals.end)


def places(rank: Rank, which: Flags) -> tuple[tuple[int, int], ...]:
    """The longest of these device spans."""
    return longest(rank.spans.start[which], rank.spans.end[which])


def names_of(rank: Rank, rows: Ints, number: int = 3) -> str:
    """The names that are most frequent among these rows, with counts."""
    names = rank.part.strings("name")
    counts = np.bincount(names.codes[rows], minlength=1)
    top: Sequence[int] = np.argsort(-counts, kind="stable")[:number].tolist()
    known = [(counts[code], short(names.values[code])) for code in top if counts[code]]
    return ", ".join(f"{name} x {count}" for count, name in known)
