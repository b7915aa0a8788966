"""Which of several ranks has become slow, from the timelines that they write.

A slow rank makes all of them slow: the others wait. What tells it apart is its own work, the step
without the waits, which is longer than before.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import Kind, Timeline, read

FEWEST = 5
"""Steps on either side that work is told from."""
SHARE = 0.5
"""Of the slowdown, what a rank's work has to be longer to be named."""


def late_ranks(folder: Path, since: int, rise_s: float) -> tuple[int, ...]:
    """Return the ranks whose own work explains a slowdown; none where timelines do not reach."""
    before: dict[int, list[float]] = {}
    after: dict[int, list[float]] = {}
    for part in _parts(folder):
        for rank, number, work_s in worked(part):
            (after if number >= since else before).setdefault(rank, []).append(work_s)
    found = [
        rank
        for rank, new in sorted(after.items())
        if len(new) >= FEWEST
        and len(before.get(rank, ())) >= FEWEST
        and median(new) - median(before[rank]) >= SHARE * rise_s
    ]
    return tuple(found) if len(found) < len(after) else ()  # all of them are nobody


def _parts(folder: Path) -> Iterator[Timeline]:
    for one in (folder, folder / "before"):
        try:
            yield read(one, columns=["rank", "name", "kind", "start_ns", "duration_ns"])
        except DamagedFile as damage:  # the run still writes it
            if isinstance(damage.kept, Timeline):
                yield damage.kept
        except InputError:
            continue


def worked(timeline: Timeline) -> Iterator[tuple[int, int, float]]:
    """Give rank, step and seconds of work, the waits taken out, for every step there."""
    names, kinds = timeline.strings("name"), timeline.strings("kind")
    ranks = timeline.column("rank")
    start, length = timeline.column("start_ns"), timeline.column("duration_ns")
    numbers = np.array([_number(str(name)) for name in names.values] + [0])[names.codes]
    waits = np.array([value == Kind.WAIT for value in kinds.values] + [False])[kinds.codes]
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
