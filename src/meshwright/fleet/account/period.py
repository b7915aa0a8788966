"""What became of GPUs that no job held: down, draining, reserved, or free for a cause."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshwright.fleet.account.attempts import JobAttempts
from meshwright.fleet.account.buckets import (
    ALLOCATED_CELLS,
    FREE_CELLS,
    WORKED_CELLS,
    AccountCell,
    find_cell_index,
)
from meshwright.fleet.account.capacity_fit import fit_to_capacity
from meshwright.fleet.account.free_causes import FREE_CAUSES, attribute_free_gpus, build_free_pool
from meshwright.fleet.account.gpu_activity import (
    IDLE_THRESHOLD,
    ActivityRollups,
    SegmentActivity,
    measure_segments,
)
from meshwright.fleet.account.inventory import (
    DOWN,
    DRAINING,
    RESERVED,
    UNKNOWN,
    UP,
    NodeInventory,
    NodeStateSpans,
)
from meshwright.fleet.account.phases import PHASE_PRIORITY, PRODUCTIVE, UNKNOWN_PHASE, AttemptPhases
from meshwright.fleet.account.segments import (
    AllocationIndex,
    AllocationSegments,
    build_segments,
    clip_spans,
)
from meshwright.fleet.account.ticks import Floats, Ints, TickWindow, round_down, split_amount

CellTotals = dict[AccountCell, int]

_STATE_CELLS = {
    DOWN: AccountCell("down", "nodes"),
    DRAINING: AccountCell("draining", "nodes"),
    RESERVED: AccountCell("reserved", "nodes"),
    UNKNOWN: AccountCell("unknown", "unknown"),
}

_CAUSE_CELLS = tuple(
    AccountCell(cause.rstrip("?"), "unknown") if cause.endswith("?")
    else AccountCell(cause, "accounting" if cause == "quota" else "nodes")
    for cause in FREE_CAUSES
)  # fmt: skip


class FittedSegments(NamedTuple):
    """What pieces keep within a part of the window."""

    segments: AllocationSegments
    part_ms: Ints
    inferred_part_ms: Ints
    pool: Ints
    spans: NodeStateSpans


def clamp_to_pools(fitted: FittedSegments) -> FittedSegments:
    """Take back the last ticks that rounding gave to claims without a node."""
    kept, told = fitted.part_ms, fitted.part_ms - fitted.inferred_part_ms
    loose = np.flatnonzero((fitted.segments.node < 0) & (kept > 0))
    for one in np.unique(fitted.pool[loose]):
        room = sum(_left(fitted, int(one)).values())
        mine = loose[fitted.pool[loose] == one]
        mine = mine[np.argsort(-kept[mine], kind="stable")]
        over = int(told[mine].sum()) - room
        if over > 0:
            kept[mine] -= np.diff(np.minimum(np.cumsum(told[mine]), over), prepend=0)
    return fitted._replace(part_ms=kept, inferred_part_ms=np.minimum(fitted.inferred_part_ms, kept))


def _left(fitted: FittedSegments, one: int) -> dict[int, int]:
    """What jobs on told nodes leave of a pool that jobs without a node may have been on."""
    left, stretches = {}, fitted.spans
    placed = fitted.segments.span >= 0
    for state in (UP, RESERVED, UNKNOWN):
        there = (stretches.pool == one) & (stretches.state == state)
        inside = np.zeros(fitted.segments.size, np.bool_)
        inside[placed] = there[fitted.segments.span[placed]]
        whole = (stretches.gpu_parts * (stretches.until_ms - stretches.since_ms))[there].sum()
        left[state] = int(whole) - int(fitted.part_ms[inside].sum())
    return left


def account_free_gpus(
    found: JobAttempts, pool_of: Ints, fitted: FittedSegments, part: TickWindow
) -> CellTotals:
    """Say what became of all that no job kept; `pool_of` is the pool of each attempt."""
    cells = dict.fromkeys(FREE_CELLS, 0)
    stretches = fitted.spans
    size = stretches.gpu_parts * (stretches.until_ms - stretches.since_ms)
    taken = np.zeros(len(size), np.int64)
    placed = fitted.segments.span >= 0
    np.add.at(taken, fitted.segments.span[placed], fitted.part_ms[placed])
    for state in (DOWN, DRAINING):
        cells[_STATE_CELLS[state]] += int((size - taken)[stretches.state == state].sum())
    for one in np.unique(stretches.pool):
        left = _left(fitted, int(one))
        loose = (fitted.segments.node < 0) & (fitted.pool == one)
        used = int((fitted.part_ms - fitted.inferred_part_ms)[loose].sum())
        for state in left:
            own = min(left[state], used)
            left[state], used = left[state] - own, used - own
        for state in (RESERVED, UNKNOWN):
            cells[_STATE_CELLS[state]] += left[state]
        if left[UP]:
            shape = build_free_pool(
                int(one),
                stretches,
                fitted.segments,
                kept=fitted.part_ms,
                pool=fitted.pool,
                window=part,
            )
            due = attribute_free_gpus(found, pool_of, shape, part)
            for cell, amount in zip(_CAUSE_CELLS, split_amount(left[UP], due), strict=True):
                cells[cell] += amount
    return cells


class AccountInputs(NamedTuple):
    """What is known of the whole window."""

    attempts: JobAttempts
    phases: AttemptPhases
    allocations: AllocationIndex
    inventory: NodeInventory
    pool_by_attempt: Ints
    load_rollups: Callable[[TickWindow], ActivityRollups | None]


class PeriodTotals(NamedTuple):
    """What a part of the window comes to."""

    cells: CellTotals
    capacity: int
    inferred_capacity: int
    assumed_uptime: int
    oversubscribed: int


def account_period(
    work: AccountInputs, part: TickWindow, by_attempt: Ints, tensor: Floats
) -> PeriodTotals:
    """Account for a part of the window; adds to the sums of attempts."""
    stretches = clip_spans(work.inventory.spans, part)
    segments = build_segments(work.phases, work.allocations, stretches, part)
    pool = np.where(
        segments.node >= 0,
        _take(work.inventory.node_pool, segments.node),
        work.pool_by_attempt[segments.attempt],
    )
    told_from = np.full(len(work.inventory.pool_names), part.duration_ms)
    told = stretches.is_assumed == 0
    np.minimum.at(told_from, stretches.pool[told], stretches.since_ms[told])
    fit = fit_to_capacity(segments, stretches, pool, told_from)
    kept = clamp_to_pools(
        FittedSegments(segments, fit.fitted_part_ms, fit.inferred_part_ms, pool, stretches)
    )
    split = _split(work, segments, kept.part_ms, part, tensor)
    cells = dict.fromkeys((*ALLOCATED_CELLS, *FREE_CELLS), 0)
    for at, cell in enumerate(ALLOCATED_CELLS):
        np.add.at(by_attempt[:, at], segments.attempt, split[at])
        cells[cell] = int(split[at].sum())
    for cell, amount in account_free_gpus(work.attempts, work.pool_by_attempt, kept, part).items():
        cells[cell] += amount
    there = stretches.gpu_parts * (stretches.until_ms - stretches.since_ms)
    inferred = int(kept.inferred_part_ms.sum())
    claimed = int(segments.part_ms.sum())
    return PeriodTotals(
        cells, int(there.sum()) + inferred, inferred, int(there[~told].sum()),
        claimed - int(kept.part_ms.sum()),
    )  # fmt: skip


def _take(values: Ints, at: Ints) -> Ints:
    return values[np.maximum(at, 0)] if len(values) else np.zeros(len(at), np.int64)


def _split(
    work: AccountInputs, segments: AllocationSegments, kept: Ints, part: TickWindow, tensor: Floats
) -> Ints:
    """Split what each piece keeps over CELLS."""
    split = np.zeros((len(ALLOCATED_CELLS), segments.size), np.int64)
    for code, name in enumerate(PHASE_PRIORITY):
        if code != PRODUCTIVE:
            split[find_cell_index(name, "progress")] = np.where(segments.phase == code, kept, 0)
    split[find_cell_index("productive", "progress")] = np.where(
        segments.phase == PRODUCTIVE, kept, 0
    )
    untold = np.where(segments.phase == UNKNOWN_PHASE, kept, 0)
    measures = work.load_rollups(part)
    if measures is not None:
        began = work.attempts.start_ms[segments.attempt] - part.since_ms
        seen = measure_segments(measures, segments, began, part)
        if seen is not None:
            untold = _by_samples(split, seen, untold)
            # What is known of tensor activity counts wherever the GPU was active.
            for at, shares in enumerate((seen.tensor, seen.tensor_known)):
                np.add.at(tensor[at], segments.attempt, shares * kept)
    util = work.attempts.gpu_util[segments.attempt]
    for bucket, evidence, those in (
        ("idle", "accounting", util < IDLE_THRESHOLD),
        ("productive", "accounting", util >= IDLE_THRESHOLD),
        ("unmeasured", "unknown", np.isnan(util)),
    ):
        split[find_cell_index(bucket, evidence)] += np.where(those, untold, 0)
    saved = work.phases.is_checkpoint_known[segments.attempt]
    for bucket, evidence in WORKED_CELLS:
        at = find_cell_index(bucket, evidence)
        gone = np.where(segments.is_lost, split[at], 0)
        split[find_cell_index("lost_work", "progress")] += np.where(saved, gone, 0)
        split[find_cell_index("lost_work", "unknown")] += np.where(saved, 0, gone)
        split[at] -= gone
    return split


def _by_samples(split: Ints, seen: SegmentActivity, untold: Ints) -> Ints:
    """Fill in what samples tell; returns what is still not known."""
    covered = round_down(untold * seen.covered, untold)
    idle = round_down(untold * seen.idle, covered)
    startup = round_down(untold * seen.startup, idle)
    split[find_cell_index("startup", "samples")] = startup
    split[find_cell_index("idle", "samples")] = idle - startup
    split[find_cell_index("productive", "samples")] = covered - idle
    return untold - covered
