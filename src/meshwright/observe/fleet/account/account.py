"""Every GPU-hour of a fleet over a window, in exactly one bucket.

The hours that there are come from the nodes: GPUs times time. What jobs held is cut out of them,
what is left was free or down. All of it is in whole numbers, and each bucket is what others leave
of a whole, so that the sum is what there was, whatever the rows say.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.account.activity import Rolled, rolled
from meshwright.observe.fleet.account.attempts import Attempts, attempts
from meshwright.observe.fleet.account.buckets import BUCKETS, CELLS, FREE_CELLS, Cell
from meshwright.observe.fleet.account.claims import claims, with_held_gpus, with_holders
from meshwright.observe.fleet.account.free import Totals
from meshwright.observe.fleet.account.one_step import Work, step
from meshwright.observe.fleet.account.phases import Phases, phases
from meshwright.observe.fleet.account.pieces import indexed, within
from meshwright.observe.fleet.account.places import Places, places, pools_of, since_first_job
from meshwright.observe.fleet.account.ticks import (
    HOUR,
    MS,
    NEVER,
    PARTS,
    Floats,
    Longs,
    Window,
    window,
)
from meshwright.observe.fleet.tables import HELD, JOBS, NODES

_DAY_S, _MOST_STEPS = 86_400, 120
Rollups = Callable[[float, float], tuple[pa.Table, int] | None]
"""Gives the roll-ups that begin between two moments, and over how many seconds each is: so that
only a day's are held at a time."""


class Step(NamedTuple):
    """A day of the window, or a week."""

    window: Window
    cells: Totals
    waited: int
    """What jobs waited for: GPUs asked times the time they waited for them."""


class Account(NamedTuple):
    """Where the GPU-hours of a window went; amounts are 840ths of GPUs times milliseconds."""

    window: Window
    steps: tuple[Step, ...]
    capacity: int
    """All that there was: the sum of all cells."""
    inferred: int
    """Of it, what was held where no node is told."""
    assumed: int
    """Of it, what nodes had between the first job on them and what is told of them."""
    cut: int
    """What jobs claimed beyond what there was; no part of the capacity."""
    free: Totals
    by_attempt: Longs
    """A row for each attempt and a column for each of CELLS."""
    waited: Longs
    """For each attempt."""
    tensor: Floats
    """For each attempt, tensor activity summed over what was measured, and how much that is."""
    attempts: Attempts
    phases: Phases
    places: Places
    oddities: dict[str, int]

    def cells(self) -> Totals:
        """All amounts by bucket and evidence."""
        sums = [int(total) for total in self.by_attempt.sum(axis=0)]
        return dict(zip(CELLS, sums, strict=True)) | self.free

    def buckets(self) -> dict[str, int]:
        """All amounts by bucket."""
        return by_bucket(self.cells())

    @property
    def gpus(self) -> float:
        """The most GPUs that told nodes had at any time, down or not."""
        there = within(self.places.stretches, self.window)
        times = np.concatenate([there.until, there.since])
        change = np.concatenate([-there.parts, there.parts])
        reached = np.cumsum(change[np.argsort(times, kind="stable")])
        return float(reached.max(initial=0)) / PARTS

    @property
    def jobs_from(self) -> int:
        """When the first job of the window held or waited for a GPU; its end where none did."""
        jobs = self.attempts
        begun = jobs.start[self.by_attempt.any(axis=1)]
        asked = jobs.waits[(jobs.waits != NEVER) & (jobs.parts > 0)]
        first = int(np.concatenate([begun, asked]).min(initial=self.window.until))
        return max(first, self.window.since)

    @property
    def known_from(self) -> int:
        """The first moment of the window of which any hour is known; its end where none is."""
        there = within(self.places.stretches, self.window)
        told = there.since[there.parts > 0] + self.window.since
        return int(min(told.min(initial=self.window.until), self.jobs_from))

    @property
    def held(self) -> int:
        """What jobs held."""
        return int(self.by_attempt.sum())


def by_bucket(cells: Mapping[Cell, int]) -> dict[str, int]:
    """Add up what is known in different ways."""
    found = dict.fromkeys((bucket.name for bucket in BUCKETS), 0)
    for cell, amount in cells.items():
        found[cell.bucket] += amount
    return found


def hours(amount: float) -> float:
    """Return an amount in GPU-hours."""
    return amount / HOUR


def account(
    jobs: pa.Table, nodes: pa.Table | None = None, *, since_s: float, until_s: float,
    held: pa.Table | None = None, rollups: pa.Table | Rollups | None = None, rollup_s: int = 300,
    progress: pa.Table | None = None, gpus: Mapping[str, int] | None = None,
) -> Account:  # fmt: skip
    """Account for the hours between two moments.

    `rollups` are samples rolled up over `rollup_s` seconds, with columns such as `gpu_util_mean`,
    or what gives those of a stretch of time; `gpus` tells how many GPUs clusters have of which no
    node is told.
    """
    whole = window(since_s, until_s)
    held = _shaped(held, HELD) if held is not None else None
    found = attempts(with_holders(_shaped(jobs, JOBS), held), whole.until)
    found = with_held_gpus(found, held)
    known = places(_shaped(nodes, NODES), found, dict(gpus or {}))
    claimed, known = claims(found, held, known)
    ran = (found.start != NEVER) & (found.end > found.start)
    known = since_first_job(
        known, np.where(ran[claimed.attempt], claimed.node, -1), found.start[claimed.attempt]
    )
    told = phases(found, progress)
    work = Work(
        found, told, indexed(claimed, found.size), known, pools_of(known, found),
        _measures(rollups, known, rollup_s),
    )  # fmt: skip
    by_attempt = np.zeros((found.size, len(CELLS)), np.int64)
    waited, tensor = np.zeros(found.size, np.int64), np.zeros((2, found.size))
    steps, ones = [], []
    for part in cut_up(whole):
        one = step(work, part, by_attempt, tensor)
        own = _waited(found, part)
        waited += own
        ones.append(one)
        steps.append(Step(part, one.cells, int(own.sum())))
    return Account(
        window=whole,
        steps=tuple(steps),
        capacity=sum(one.capacity for one in ones),
        inferred=sum(one.inferred for one in ones),
        assumed=sum(one.assumed for one in ones),
        cut=sum(one.cut for one in ones),
        free={cell: sum(one.cells[cell] for one in ones) for cell in FREE_CELLS},
        by_attempt=by_attempt,
        waited=waited,
        tensor=tensor,
        attempts=found,
        phases=told,
        places=known,
        oddities={**found.oddities, **told.oddities},
    )


def _measures(
    rollups: pa.Table | Rollups | None, known: Places, width_s: int
) -> Callable[[Window], Rolled | None]:
    if callable(rollups):

        def of(part: Window) -> Rolled | None:
            found = rollups(part.since / MS, part.until / MS)
            return None if found is None else rolled(found[0], known, found[1])

        return of
    whole = rolled(rollups, known, width_s)
    return lambda _: whole


def _shaped(rows: pa.Table | None, schema: pa.Schema) -> pa.Table:
    """Return the rows with all columns of a schema."""
    if rows is None:
        return schema.empty_table()
    return pa.table(
        [
            rows[field.name].cast(field.type) if field.name in rows.column_names
            else pa.nulls(rows.num_rows, field.type)
            for field in schema
        ],
        schema=schema,
    )  # fmt: skip


def cut_up(whole: Window) -> Iterator[Window]:
    """Cut a window into days of UTC, or into weeks where there are many."""
    day = _DAY_S * MS
    size = day if whole.span <= _MOST_STEPS * day else 7 * day
    since = whole.since
    while since < whole.until:
        # Weeks begin on Mondays: the first of 1970 was the 5th of January.
        offset = 4 * day if size > day else 0
        until = min(whole.until, ((since - offset) // size + 1) * size + offset)
        yield Window(since, until)
        since = until


def _waited(found: Attempts, part: Window) -> Longs:
    """What each attempt waited for within a part of the window."""
    since = np.maximum(found.waits, part.since)
    until = np.minimum(found.waited, part.until)
    waits = (found.waits != NEVER) & (until > since)
    return np.where(waits, found.parts * (until - since), 0)
