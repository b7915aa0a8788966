"""One day or week of an account: what jobs held of it, over the buckets, and what was free."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshwright.observe.fleet.account.activity import IDLE_BELOW, Measured, Rolled, measured
from meshwright.observe.fleet.account.attempts import Attempts
from meshwright.observe.fleet.account.buckets import CELLS, FREE_CELLS, column
from meshwright.observe.fleet.account.fit import fitted
from meshwright.observe.fleet.account.free import Kept, Totals, free, within_pools
from meshwright.observe.fleet.account.phases import ORDER, PRODUCTIVE, UNTOLD, Phases
from meshwright.observe.fleet.account.pieces import Index, Pieces, pieces, within
from meshwright.observe.fleet.account.places import Places
from meshwright.observe.fleet.account.ticks import Floats, Longs, Window, floored


class Work(NamedTuple):
    """What is known of the whole window."""

    found: Attempts
    told: Phases
    claimed: Index
    known: Places
    pool: Longs
    measures: Callable[[Window], Rolled | None]


class Done(NamedTuple):
    """What a part of the window comes to."""

    cells: Totals
    capacity: int
    inferred: int
    assumed: int
    cut: int


def step(work: Work, part: Window, by_attempt: Longs, tensor: Floats) -> Done:
    """Account for a part of the window; adds to the sums of attempts."""
    stretches = within(work.known.stretches, part)
    held = pieces(work.told, work.claimed, stretches, part)
    pool = np.where(held.node >= 0, _take(work.known.node_pool, held.node), work.pool[held.attempt])
    told_from = np.full(len(work.known.pools), part.span)
    told = stretches.assumed == 0
    np.minimum.at(told_from, stretches.pool[told], stretches.since[told])
    fit = fitted(held, stretches, pool, told_from)
    kept = within_pools(Kept(held, fit.kept, fit.inferred, pool, stretches))
    split = _split(work, held, kept.amount, part, tensor)
    cells = dict.fromkeys((*CELLS, *FREE_CELLS), 0)
    for at, cell in enumerate(CELLS):
        np.add.at(by_attempt[:, at], held.attempt, split[at])
        cells[cell] = int(split[at].sum())
    for cell, amount in free(work.found, work.pool, kept, part).items():
        cells[cell] += amount
    there = stretches.parts * (stretches.until - stretches.since)
    inferred = int(kept.inferred.sum())
    claimed = int(held.amount.sum())
    return Done(
        cells, int(there.sum()) + inferred, inferred, int(there[~told].sum()),
        claimed - int(kept.amount.sum()),
    )  # fmt: skip


def _take(values: Longs, at: Longs) -> Longs:
    return values[np.maximum(at, 0)] if len(values) else np.zeros(len(at), np.int64)


def _split(work: Work, held: Pieces, kept: Longs, part: Window, tensor: Floats) -> Longs:
    """Split what each piece keeps over CELLS."""
    split = np.zeros((len(CELLS), held.size), np.int64)
    for code, name in enumerate(ORDER):
        if code != PRODUCTIVE:
            split[column(name, "progress")] = np.where(held.phase == code, kept, 0)
    split[column("productive", "progress")] = np.where(held.phase == PRODUCTIVE, kept, 0)
    untold = np.where(held.phase == UNTOLD, kept, 0)
    measures = work.measures(part)
    if measures is not None:
        began = work.found.start[held.attempt] - part.since
        seen = measured(measures, held, began, part)
        if seen is not None:
            untold = _by_samples(split, seen, untold)
            # What is known of tensor activity counts wherever the GPU was active.
            for at, shares in enumerate((seen.tensor, seen.tensor_known)):
                np.add.at(tensor[at], held.attempt, shares * kept)
    util = work.found.gpu_util[held.attempt]
    for bucket, evidence, those in (
        ("idle", "accounting", util < IDLE_BELOW),
        ("productive", "accounting", util >= IDLE_BELOW),
        ("productive", "unknown", np.isnan(util)),
    ):
        split[column(bucket, evidence)] += np.where(those, untold, 0)
    saved = work.told.saved[held.attempt]
    for evidence in ("progress", "samples", "accounting", "unknown"):
        at = column("productive", evidence)
        gone = np.where(held.lost, split[at], 0)
        split[column("lost", "progress")] += np.where(saved, gone, 0)
        split[column("lost", "unknown")] += np.where(saved, 0, gone)
        split[at] -= gone
    return split


def _by_samples(split: Longs, seen: Measured, untold: Longs) -> Longs:
    """Fill in what samples tell; returns what is still not known."""
    covered = floored(untold * seen.covered, untold)
    idle = floored(untold * seen.idle, covered)
    startup = floored(untold * seen.startup, idle)
    split[column("startup", "samples")] = startup
    split[column("idle", "samples")] = idle - startup
    split[column("productive", "samples")] = covered - idle
    return untold - covered
