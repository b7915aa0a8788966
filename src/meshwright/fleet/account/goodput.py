"""How much of what a job, a user or a team had to do with was work: goodput, and its parts.

ML productivity goodput is scheduling × runtime × program goodput. Scheduling goodput is the part
of the time in which the GPUs were there: held over held and waited for, and for a whole fleet held
over all that there was. Runtime goodput is the part of what was held that was productive. Program
goodput is MFU, or tensor activity where no MFU is told. The effective training time ratio (ETTR) is
productive time over the time from asking to the end, waits and lost work in it.
"""

from typing import Final, NamedTuple

import numpy as np

from meshwright.fleet.account.account import GpuHourAccount
from meshwright.fleet.account.buckets import ALLOCATED_CELLS, WORKED_CELLS, find_cell_index
from meshwright.fleet.account.ticks import (
    PART_MS_PER_GPU_HOUR,
    PARTS_PER_GPU,
    UNKNOWN_TIME,
    Floats,
    Ints,
)
from meshwright.fleet.columns import CodedColumn

GROUP_KEYS: Final = ("cluster", "job", "user", "team", "partition", "workload")
"""What goodput can be told by."""
_PRODUCTIVE = [find_cell_index(*cell) for cell in WORKED_CELLS]


class GoodputBreakdown(NamedTuple):
    """What became of the hours of somebody."""

    name: str
    num_attempts: int
    allocated_hours: float
    pending_hours: float
    hours_by_bucket: dict[str, float]
    """Held hours by bucket."""
    unknown_hours: float
    """Held hours that nothing tells about."""
    scheduling_goodput: float | None
    """None where nobody tells how long jobs waited, or of a fleet what GPUs it has."""
    runtime_goodput: float | None
    """Hours that nothing tells about count as productive: it is that much at most."""
    program_goodput: float | None
    program_metric: str
    """`mfu`, `tensor` or nothing."""
    program_hours: float
    """Of how many hours it is known."""
    ettr: float | None

    @property
    def goodput(self) -> float | None:
        """The product of the three; None where one is not known."""
        parts = self.scheduling_goodput, self.runtime_goodput, self.program_goodput
        return (
            None if None in parts else float(np.prod([part for part in parts if part is not None]))
        )


def compute_goodput(
    found: GpuHourAccount, by: str, most: int | None = None
) -> tuple[GoodputBreakdown, ...]:
    """Tell it by one of KINDS, the most hours first; behind them those who only waited."""
    groups = _groups(found, by)
    held, waited = (
        np.bincount(groups.codes + 1, each, len(groups.values) + 1)
        for each in (_held(found), found.pending.astype(np.float64))
    )
    order = np.lexsort((-waited, -held))
    order = order[(held + waited)[order] > 0][:most]
    place = np.full(len(held), -1, np.int64)
    place[order] = np.arange(len(order))
    sums = _Sums(found, place[groups.codes + 1], len(order))
    return tuple(
        sums.one(at, groups.values[code - 1] if code else "", fleet=None)
        for at, code in enumerate(order.tolist())
    )


def count_held_at_end(found: GpuHourAccount, by: str) -> dict[str, float]:
    """Return how many GPUs each one held at the last moment of the window."""
    jobs, last_ms = found.attempts, found.window.until_ms
    running = np.isin(
        jobs.state.codes, [at for at, state in enumerate(jobs.state.values) if state == "running"]
    )
    holds = (jobs.start_ms != UNKNOWN_TIME) & (jobs.start_ms < last_ms)
    holds &= (jobs.end_ms > last_ms) | ((jobs.end_ms >= last_ms) & running)
    groups, gpus = _groups(found, by), np.where(holds, jobs.gpu_parts, 0) / PARTS_PER_GPU
    sums = np.bincount(groups.codes + 1, gpus, len(groups.values) + 1)
    return dict(zip(("", *groups.values), sums.tolist(), strict=True))


def compute_fleet_goodput(found: GpuHourAccount) -> GoodputBreakdown:
    """Tell it of all together."""
    everyone = np.zeros(found.attempts.size, np.int64)
    # Where only what was held is known, all that is known was held: that tells nothing.
    told = found.capacity if 2 * found.inferred_capacity < found.capacity else 0
    return _Sums(found, everyone, 1).one(0, "fleet", fleet=told)


def _held(found: GpuHourAccount) -> Floats:
    sums: Floats = found.cells_by_attempt.sum(axis=1).astype(np.float64)
    return sums


def _groups(found: GpuHourAccount, by: str) -> CodedColumn:
    attempts = found.attempts
    columns = {
        "cluster": attempts.cluster, "user": attempts.user, "team": attempts.team,
        "partition": attempts.partition, "workload": attempts.workload,
    }  # fmt: skip
    if by in columns:
        return columns[by]
    if len(attempts.cluster.values) < 2:
        return attempts.job
    _, first, codes = np.unique(attempts.job_key, return_index=True, return_inverse=True)
    job, cluster = attempts.job, attempts.cluster
    return CodedColumn(
        codes.reshape(-1),
        tuple(
            f"{cluster.values[cluster.codes[at]]}/{job.values[job.codes[at]]}"
            if cluster.codes[at] >= 0 and job.codes[at] >= 0 else ""
            for at in first.tolist()
        ),
    )  # fmt: skip


class _Sums:
    """Sums over attempts that share a place; those at -1 are left out."""

    def __init__(self, found: GpuHourAccount, place: Ints, count: int) -> None:
        self._place, self._count = place, count
        self._there = np.flatnonzero(place >= 0)
        by_attempt = found.cells_by_attempt
        self._cells = [
            self._sum(by_attempt[:, at].astype(np.float64)) for at in range(len(ALLOCATED_CELLS))
        ]
        self._waited = self._sum(found.pending.astype(np.float64))
        known = found.attempts.pending_start_ms != UNKNOWN_TIME
        self._known = self._sum(by_attempt.sum(axis=1) * known.astype(np.float64))
        self._attempts = self._sum((by_attempt.sum(axis=1) > 0).astype(np.float64))
        # MFU is of productive time that jobs tell of.
        told = by_attempt[:, find_cell_index("productive", "progress")].astype(np.float64)
        own = np.where(np.isfinite(found.phases.mfu), told, 0.0)
        self._mfu = self._sum(own * np.nan_to_num(found.phases.mfu)), self._sum(own)
        self._tensor = self._sum(found.tensor[0]), self._sum(found.tensor[1])

    def _sum(self, values: Floats) -> Floats:
        there = self._there
        return np.bincount(self._place[there], values[there], self._count).astype(np.float64)

    def one(self, at: int, name: str, fleet: int | None) -> GoodputBreakdown:
        """Return the goodput of one place; `fleet` is all that there was, of a whole fleet."""
        cells = [float(cell[at]) for cell in self._cells]
        held, waited = sum(cells), float(self._waited[at])
        # Of half the hours at least it must be told how long they were waited for.
        asked = held + waited if 2 * self._known[at] >= held else 0.0
        productive = sum(cells[one] for one in _PRODUCTIVE)
        by, program, known = "", None, 0.0
        for kind, (summed, weight) in (("mfu", self._mfu), ("tensor", self._tensor)):
            if program is None and weight[at] > 0:
                by, program, known = kind, float(summed[at] / weight[at]), float(weight[at])
        hours: dict[str, float] = {}
        for cell, amount in zip(ALLOCATED_CELLS, cells, strict=True):
            hours[cell.bucket] = hours.get(cell.bucket, 0.0) + amount / PART_MS_PER_GPU_HOUR
        return GoodputBreakdown(
            name, int(self._attempts[at]), held / PART_MS_PER_GPU_HOUR,
            waited / PART_MS_PER_GPU_HOUR, hours,
            cells[find_cell_index("unmeasured", "unknown")] / PART_MS_PER_GPU_HOUR,
            _part(held, asked if fleet is None else fleet),
            _part(productive, held), program, by, known / PART_MS_PER_GPU_HOUR, _part(productive,
            asked),
        )  # fmt: skip


def _part(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
