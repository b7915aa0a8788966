"""Which of several ranks has become slow, from the timelines that they write.

A slow rank makes all of them slow: the others wait. What tells it apart is its own work, the step
without the waits, which is longer than before.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import SpanKind, Timeline, read_timeline

MIN_STEPS = 5
"""Steps on either side that work is told from."""
MIN_EXPLAINED_SHARE = 0.5
"""Of the slowdown, what a rank's work has to be longer to be named."""


def find_slow_ranks(folder: Path, since: int, rise_s: float) -> tuple[int, ...]:
    """Return the ranks whose own work explains a slowdown; none where timelines do not reach."""
    before: dict[int, list[float]] = {}
    after: dict[int, list[float]] = {}
    for part in _parts(folder):
        for rank, number, work_s in measure_rank_work(part):
            (after if number >= since else before).setdefault(rank, []).append(work_s)
    found = [
        rank
        for rank, new in sorted(after.items())
        if len(new) >= MIN_STEPS
        and len(before.get(rank, ())) >= MIN_STEPS
        and median(new) - median(before[rank]) >= MIN_EXPLAINED_SHARE * rise_s
    ]
    return tuple(found) if len(found) < len(after) else ()  # all of them are nobody


def _parts(folder: Path) -> Iterator[Timeline]:
    for one in (folder, folder / "previous"):
        try:
            yield read_timeline(one, columns=["rank", "name", "kind", "start_ns", "duration_ns"])
        except DamagedFile as damage:  # the run still writes it
            if isinstance(damage.readable, Timeline):
                yield damage.readable
        except InputError:
            continue


def measure_rank_work(timeline: Timeline) -> Iterator[tuple[int, int, float]]:
    """Give rank, step and seconds of work, the waits taken out, for every step there."""
    names, kinds = timeline.string_column("name"), timeline.string_column("kind")
    ranks = timeline.column("rank")
    start, length = timeline.column("start_ns"), timeline.column("duration_ns")
    numbers = np.array([_number(str(name)) for name in names.values] + [0])[names.codes]
    waits = np.array([value == SpanKind.WAIT for value in kinds.values] + [False])[kinds.codes]
    for rank in np.unique(ranks):
        own = ranks == rank
        order = np.argsort(start[own & waits], kind="stable")
        begins = start[own & waits][order]
        sums = np.concatenate([[0], np.cumsum(length[own & waits][order])])
        for at in np.flatnonzero(own & (numbers > 0)):
            first, last = np.searchsorted(begins, [start[at], start[at] + length[at]])
            waited = sums[last] - sums[first]
            yield int(rank), int(numbers[at]), float(length[at] - waited) / 1e9


def _number(name: str) -> int:
    word, _, number = name.partition(" ")
    return int(number) if word == "step" and number.isdecimal() else 0
