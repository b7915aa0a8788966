"""Every GPU-hour of a fleet over a window, in exactly one bucket.

The hours that there are come from the nodes: GPUs times time. What jobs held is cut out of them,
what is left was free or down. All of it is in whole numbers, and each bucket is what others leave
of a whole, so that the sum is what there was, whatever the rows say.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.account.allocations import (
    add_telemetry_gpus,
    add_telemetry_jobs,
    read_allocations,
)
from meshwright.fleet.account.attempts import JobAttempts, read_attempts
from meshwright.fleet.account.buckets import ALLOCATED_CELLS, BUCKETS, FREE_CELLS, AccountCell
from meshwright.fleet.account.gpu_activity import ActivityRollups, read_rollups
from meshwright.fleet.account.inventory import (
    NodeInventory,
    extend_to_first_job,
    find_pools,
    read_inventory,
)
from meshwright.fleet.account.period import AccountInputs, CellTotals, account_period
from meshwright.fleet.account.phases import AttemptPhases, split_phases
from meshwright.fleet.account.segments import clip_spans, index_allocations
from meshwright.fleet.account.ticks import (
    MS_PER_S,
    PART_MS_PER_GPU_HOUR,
    PARTS_PER_GPU,
    UNKNOWN_TIME,
    Floats,
    Ints,
    TickWindow,
    make_window,
)
from meshwright.fleet.tables import ALLOCATIONS, JOBS, NODES

_DAY_S, _MOST_STEPS = 86_400, 120
RollupReader = Callable[[float, float], tuple[pa.Table, int] | None]
"""Gives the roll-ups that begin between two moments, and over how many seconds each is: so that
only a day's are held at a time."""


class AccountPeriod(NamedTuple):
    """A day of the window, or a week."""

    window: TickWindow
    cells: CellTotals
    pending: int
    """What jobs waited for: GPUs asked times the time they waited for them."""


class GpuHourAccount(NamedTuple):
    """Where the GPU-hours of a window went; amounts are 840ths of GPUs times milliseconds."""

    window: TickWindow
    periods: tuple[AccountPeriod, ...]
    capacity: int
    """All that there was: the sum of all cells."""
    inferred_capacity: int
    """Of it, what was held where no node is told."""
    assumed_uptime: int
    """Of it, what nodes had between the first job on them and what is told of them."""
    oversubscribed: int
    """What jobs claimed beyond what there was; no part of the capacity."""
    free: CellTotals
    cells_by_attempt: Ints
    """A row for each attempt and a column for each of CELLS."""
    pending: Ints
    """For each attempt."""
    tensor: Floats
    """For each attempt, tensor activity summed over what was measured, and how much that is."""
    attempts: JobAttempts
    phases: AttemptPhases
    inventory: NodeInventory
    data_warnings: dict[str, int]

    def sum_cells(self) -> CellTotals:
        """All amounts by bucket and evidence."""
        sums = [int(total) for total in self.cells_by_attempt.sum(axis=0)]
        return dict(zip(ALLOCATED_CELLS, sums, strict=True)) | self.free

    def sum_buckets(self) -> dict[str, int]:
        """All amounts by bucket."""
        return sum_by_bucket(self.sum_cells())

    @property
    def peak_gpus(self) -> float:
        """The most GPUs that told nodes had at any time, down or not."""
        there = clip_spans(self.inventory.spans, self.window)
        times = np.concatenate([there.until_ms, there.since_ms])
        change = np.concatenate([-there.gpu_parts, there.gpu_parts])
        reached = np.cumsum(change[np.argsort(times, kind="stable")])
        return float(reached.max(initial=0)) / PARTS_PER_GPU

    @property
    def first_job_ms(self) -> int:
        """When the first job of the window held or waited for a GPU; its end where none did."""
        jobs = self.attempts
        begun = jobs.start_ms[self.cells_by_attempt.any(axis=1)]
        asked = jobs.pending_start_ms[
            (jobs.pending_start_ms != UNKNOWN_TIME) & (jobs.gpu_parts > 0)
        ]
        first = int(np.concatenate([begun, asked]).min(initial=self.window.until_ms))
        return max(first, self.window.since_ms)

    @property
    def first_known_ms(self) -> int:
        """The first moment of the window of which any hour is known; its end where none is."""
        there = clip_spans(self.inventory.spans, self.window)
        told = there.since_ms[there.gpu_parts > 0] + self.window.since_ms
        return int(min(told.min(initial=self.window.until_ms), self.first_job_ms))

    @property
    def allocated(self) -> int:
        """What jobs held."""
        return int(self.cells_by_attempt.sum())


def sum_by_bucket(cells: Mapping[AccountCell, int]) -> dict[str, int]:
    """Add up what is known in different ways."""
    found = dict.fromkeys((bucket.name for bucket in BUCKETS), 0)
    for cell, amount in cells.items():
        found[cell.bucket] += amount
    return found


def to_gpu_hours(amount: float) -> float:
    """Return an amount in GPU-hours."""
    return amount / PART_MS_PER_GPU_HOUR


def build_account(
    jobs: pa.Table, nodes: pa.Table | None = None, *, since_s: float, until_s: float,
    allocations: pa.Table | None = None, rollups: pa.Table | RollupReader | None = None,
    rollup_s: int = 300,
    progress: pa.Table | None = None, gpus: Mapping[str, int] | None = None,
) -> GpuHourAccount:  # fmt: skip
    """Account for the hours between two moments.

    `rollups` are samples rolled up over `rollup_s` seconds, with columns such as `gpu_util_mean`,
    or what gives those of a stretch of time; `gpus` tells how many GPUs clusters have of which no
    node is told.
    """
    whole = make_window(since_s, until_s)
    allocations = _shaped(allocations, ALLOCATIONS) if allocations is not None else None
    found = read_attempts(add_telemetry_jobs(_shaped(jobs, JOBS), allocations), whole.until_ms)
    found = add_telemetry_gpus(found, allocations)
    known = read_inventory(_shaped(nodes, NODES), found, dict(gpus or {}))
    claimed, known = read_allocations(found, allocations, known)
    ran = (found.start_ms != UNKNOWN_TIME) & (found.end_ms > found.start_ms)
    known = extend_to_first_job(
        known, np.where(ran[claimed.attempt], claimed.node, -1), found.start_ms[claimed.attempt]
    )
    told = split_phases(found, progress)
    work = AccountInputs(
        found, told, index_allocations(claimed, found.size), known, find_pools(known, found),
        _measures(rollups, known, rollup_s),
    )  # fmt: skip
    by_attempt = np.zeros((found.size, len(ALLOCATED_CELLS)), np.int64)
    waited, tensor = np.zeros(found.size, np.int64), np.zeros((2, found.size))
    steps, ones = [], []
    for part in split_window(whole):
        one = account_period(work, part, by_attempt, tensor)
        own = _waited(found, part)
        waited += own
        ones.append(one)
        steps.append(AccountPeriod(part, one.cells, int(own.sum())))
    return GpuHourAccount(
        window=whole,
        periods=tuple(steps),
        capacity=sum(one.capacity for one in ones),
        inferred_capacity=sum(one.inferred_capacity for one in ones),
        assumed_uptime=sum(one.assumed_uptime for one in ones),
        oversubscribed=sum(one.oversubscribed for one in ones),
        free={cell: sum(one.cells[cell] for one in ones) for cell in FREE_CELLS},
        cells_by_attempt=by_attempt,
        pending=waited,
        tensor=tensor,
        attempts=found,
        phases=told,
        inventory=known,
        data_warnings={**found.data_warnings, **told.data_warnings},
    )


def _measures(
    rollups: pa.Table | RollupReader | None, known: NodeInventory, width_s: int
) -> Callable[[TickWindow], ActivityRollups | None]:
    if callable(rollups):

        def of(part: TickWindow) -> ActivityRollups | None:
            found = rollups(part.since_ms / MS_PER_S, part.until_ms / MS_PER_S)
            return None if found is None else read_rollups(found[0], known, found[1])

        return of
    whole = read_rollups(rollups, known, width_s)
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


def split_window(whole: TickWindow) -> Iterator[TickWindow]:
    """Cut a window into days of UTC, or into weeks where there are many."""
    day = _DAY_S * MS_PER_S
    size = day if whole.duration_ms <= _MOST_STEPS * day else 7 * day
    since = whole.since_ms
    while since < whole.until_ms:
        # Weeks begin on Mondays: the first of 1970 was the 5th of January.
        offset = 4 * day if size > day else 0
        until = min(whole.until_ms, ((since - offset) // size + 1) * size + offset)
        yield TickWindow(since, until)
        since = until


def _waited(found: JobAttempts, part: TickWindow) -> Ints:
    """What each attempt waited for within a part of the window."""
    since = np.maximum(found.pending_start_ms, part.since_ms)
    until = np.minimum(found.pending_end_ms, part.until_ms)
    waits = (found.pending_start_ms != UNKNOWN_TIME) & (until > since)
    return np.where(waits, found.gpu_parts * (until - since), 0)
