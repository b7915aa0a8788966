"""What remedies would give back, ranked: hours and money, by whose they are.

Each remedy says how much of a bucket it leaves, so that no saving is the whole of a bucket by
default: idle GPUs are let go after half an hour, checkpoints each hour lose half an hour of work.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from meshwright.fleet.account.account import GpuHourAccount
from meshwright.fleet.account.attempts import match_states
from meshwright.fleet.account.buckets import ALLOCATED_CELLS
from meshwright.fleet.account.prices import GpuPrices
from meshwright.fleet.account.ticks import PART_MS_PER_GPU_HOUR, Floats

OPERATIONS, SCHEDULING = "(operations)", "(scheduling)"


class Remedy(NamedTuple):
    """Something to do about a bucket."""

    name: str
    bucket: str
    description: str
    allowance_hours: float
    """What each attempt keeps of it, for each of its GPUs."""


JOB_REMEDIES: Final = (
    Remedy("release idle GPUs", "idle", "end or shrink jobs after 30 idle minutes", 0.5),
    Remedy("checkpoint hourly", "lost_work", "half an hour is lost to each failure then", 0.5),
    Remedy("start faster", "startup", "cached images, weights, compiled code: 5 minutes", 1 / 12),
    Remedy("feed the GPUs", "data_wait", "more loader processes, faster or nearer storage", 0.0),
    Remedy("overlap exchange", "communication", "another layout, buckets, overlap", 0.0),
    Remedy("checkpoint aside", "checkpoint", "write from host memory while training goes on", 0.0),
)
"""Remedies of those who run the jobs; of work that nodes lost, of those who run the nodes."""
FLEET_REMEDIES: Final = (
    (OPERATIONS, Remedy("repair sooner", "down", "spares, automatic tests, quick returns", 0.0)),
    (OPERATIONS, Remedy("drain less long", "draining", "repair as soon as a node is empty", 0.0)),
    (SCHEDULING, Remedy("pack jobs", "fragmented", "best fit, whole nodes for large jobs", 0.0)),
    (
        SCHEDULING,
        Remedy("backfill", "queue_order", "let small jobs pass what cannot start yet", 0.0),
    ),
    (SCHEDULING, Remedy("lend quotas", "quota", "idle GPUs borrowed, with preemption", 0.0)),
    (SCHEDULING, Remedy("short reservations", "reserved", "short jobs until they begin", 0.0)),
)


class PotentialSaving(NamedTuple):
    """What a remedy would give back at most."""

    remedy: str
    description: str
    bucket: str
    owner: str
    hours: float
    dollars: float | None
    num_attempts: int
    """How many attempts it is about; 0 for a remedy of the fleet."""


def rank_savings(
    found: GpuHourAccount, prices: GpuPrices, by: str = "user"
) -> tuple[PotentialSaving, ...]:
    """Rank what remedies would give back, the most hours first."""
    rows: list[PotentialSaving] = []
    price = price_attempts(found, prices)
    for remedy in JOB_REMEDIES:
        rows += _of_jobs(found, remedy, price, by)
    average = mean_gpu_price(found, prices)
    totals = found.sum_buckets()
    for owner, remedy in FLEET_REMEDIES:
        hours = totals[remedy.bucket] / PART_MS_PER_GPU_HOUR
        dollars = None if average is None else hours * average
        rows.append(
            PotentialSaving(
                remedy.name, remedy.description, remedy.bucket, owner, hours, dollars, 0
            )
        )
    return tuple(sorted((row for row in rows if row.hours > 0), key=lambda row: -row.hours))


def group_by_remedy(rows: tuple[PotentialSaving, ...]) -> tuple[PotentialSaving, ...]:
    """Add up what all owners would give back; `owner` is then whose most of it is."""
    return _added(rows, lambda row: row.remedy)


def group_by_owner(rows: tuple[PotentialSaving, ...]) -> tuple[PotentialSaving, ...]:
    """Add up all remedies of each owner; `remedy` is then the one that gives most."""
    return _added(rows, lambda row: row.owner)


def _added(
    rows: tuple[PotentialSaving, ...], key: Callable[[PotentialSaving], str]
) -> tuple[PotentialSaving, ...]:
    """Add up rows of one key, which come with the largest first."""
    found: dict[str, PotentialSaving] = {}
    for row in rows:
        old = found.get(key(row))
        if old is None:
            found[key(row)] = row
            continue
        known = old.dollars is not None and row.dollars is not None
        found[key(row)] = old._replace(
            hours=old.hours + row.hours,
            dollars=(old.dollars or 0.0) + (row.dollars or 0.0) if known else None,
            num_attempts=old.num_attempts + row.num_attempts,
        )
    return tuple(sorted(found.values(), key=lambda row: -row.hours))


def _of_jobs(
    found: GpuHourAccount, remedy: Remedy, price: Floats, by: str
) -> list[PotentialSaving]:
    columns = [at for at, cell in enumerate(ALLOCATED_CELLS) if cell.bucket == remedy.bucket]
    spent = found.cells_by_attempt[:, columns].sum(axis=1) / PART_MS_PER_GPU_HOUR
    gpus = found.attempts.gpu_parts / 840
    back = np.clip(spent - remedy.allowance_hours * gpus, 0.0, None)
    owners = found.attempts.team if by == "team" else found.attempts.user
    code = owners.codes + 1
    names = ["", *owners.values, OPERATIONS, SCHEDULING]
    if remedy.bucket == "lost_work":
        code = np.where(match_states(found.attempts, "node_fail"), len(names) - 2, code)
        code = np.where(match_states(found.attempts, "preempted"), len(names) - 1, code)
    hours = np.bincount(code, back, len(names))
    dollars = np.bincount(code, back * price, len(names))
    jobs = np.bincount(code, back > 0, len(names))
    return [
        PotentialSaving(
            remedy.name, remedy.description, remedy.bucket, names[at], float(hours[at]),
            None if np.isnan(dollars[at]) else float(dollars[at]), int(jobs[at]),
        )
        for at in np.flatnonzero(hours > 0).tolist()
    ]  # fmt: skip


def price_attempts(found: GpuHourAccount, prices: GpuPrices) -> Floats:
    """Return the price of an hour for each attempt: of its own kind of GPU, or of the fleet's."""
    average = mean_gpu_price(found, prices)
    unknown = np.nan if average is None else average
    table = [unknown]
    for kind in found.attempts.gpu_kind.values:
        price = prices.find(kind)
        table.append(unknown if price is None else price.dollars_per_hour)
    found_prices: Floats = np.array(table)[found.attempts.gpu_kind.codes + 1]
    return found_prices


def mean_gpu_price(found: GpuHourAccount, prices: GpuPrices) -> float | None:
    """Return the mean price over all GPUs of told nodes; None where that of any is not known."""
    stretches, kinds = found.inventory.spans, found.inventory.node_gpu_kind
    if prices.default_price is not None and not prices.by_kind:
        return prices.default_price.dollars_per_hour
    weights: dict[str | None, float] = {}
    since = np.maximum(stretches.since_ms, found.window.since_ms)
    until = np.minimum(stretches.until_ms, found.window.until_ms)
    amounts = stretches.gpu_parts * np.clip(until - since, 0, None)
    for node, amount in zip(stretches.node.tolist(), amounts.tolist(), strict=True):
        weights[kinds[node]] = weights.get(kinds[node], 0.0) + amount
    if not weights:  # no node is told: the kinds that jobs ask for
        held = found.cells_by_attempt.sum(axis=1).astype(float)
        kind = found.attempts.gpu_kind
        sums = np.bincount(kind.codes + 1, held, len(kind.values) + 1)
        weights = {
            name: float(sum_) for name, sum_ in zip((None, *kind.values), sums, strict=True) if sum_
        }
    whole, dollars = sum(weights.values()), 0.0
    for kind_name, weight in weights.items():
        price = prices.find(kind_name)
        if price is None:
            return None
        dollars += price.dollars_per_hour * weight
    return dollars / whole if whole else None


def describe_price_sources(found: GpuHourAccount, prices: GpuPrices) -> tuple[str, ...]:
    """Say where the prices come from."""
    kinds = dict.fromkeys((*found.inventory.node_gpu_kind, *found.attempts.gpu_kind.values))
    told = (prices.find(kind) for kind in kinds)
    return tuple(
        dict.fromkeys(f"{p.dollars_per_hour:g} $ ({p.source})" for p in told if p is not None)
    )
