"""Formats and selects the evidence of a rank's findings: top kernels, counts, longest spans."""

from collections.abc import Sequence

import numpy as np

from meshwright.observe.analyze.spans.intervals import Flags, Intervals, Ints
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import MAX_SPANS
from meshwright.observe.findings.text_format import format_duration, truncate_name


def format_per_step(rank: RankContext, number: float) -> str:
    """A count per step where steps are known, else in all."""
    if rank.num_steps is None:
        return f"{number:.0f}"
    return f"{number / rank.num_steps:.0f} per step"


def format_top_kernels(rank: RankContext, which: Flags, number: int = 3) -> tuple[str, ...]:
    """The kernels among these that take longest: time, count, name."""
    if not which.any():
        return ()
    names = rank.spans.name[which]
    total = np.bincount(names, rank.duration_ns[which])
    count = np.bincount(names)
    longest = np.argsort(-total, kind="stable")[:number]
    return tuple(
        f"{format_duration(total[code])} in {count[code]} x {truncate_name(rank.spans.names[code])}"
        for code in longest.tolist()
        if count[code]
    )


def select_longest_spans(start: Ints, end: Ints) -> tuple[tuple[int, int], ...]:
    """The longest of these spans."""
    order = np.argsort(start - end, kind="stable")[:MAX_SPANS]
    return tuple((int(start[at]), int(end[at])) for at in order.tolist())


def select_longest_intervals(intervals: Intervals) -> tuple[tuple[int, int], ...]:
    """The longest of these intervals."""
    return select_longest_spans(intervals.start, intervals.end)


def select_longest_device_spans(rank: RankContext, which: Flags) -> tuple[tuple[int, int], ...]:
    """The longest of these device spans."""
    return select_longest_spans(rank.spans.start[which], rank.spans.end[which])


def format_top_names(rank: RankContext, rows: Ints, number: int = 3) -> str:
    """The names that are most frequent among these rows, with counts."""
    names = rank.rank_timeline.string_column("name")
    counts = np.bincount(names.codes[rows], minlength=1)
    top: Sequence[int] = np.argsort(-counts, kind="stable")[:number].tolist()
    known = [(counts[code], truncate_name(names.values[code])) for code in top if counts[code]]
    return ", ".join(f"{name} x {count}" for count, name in known)
