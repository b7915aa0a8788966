"""`FleetReport`: GPU-hours, goodput, savings and trend of a fleet, and the report as plain data."""

from typing import Any, NamedTuple

from meshwright.fleet.account import (
    BUCKET_TITLES,
    BUCKETS,
    GpuHourAccount,
    to_gpu_hours,
)
from meshwright.fleet.account.goodput import (
    GoodputBreakdown,
    compute_fleet_goodput,
    compute_goodput,
)
from meshwright.fleet.account.prices import GpuPrices
from meshwright.fleet.account.savings import (
    PotentialSaving,
    describe_price_sources,
    group_by_owner,
    group_by_remedy,
    mean_gpu_price,
    rank_savings,
)
from meshwright.fleet.account.trend import (
    Forecast,
    TrendPoint,
    build_trend,
    forecast,
    select_complete_periods,
)
from meshwright.fleet.time_format import format_day

NOTABLE_SHARE = 0.02
"""Of the time asked for: what is unknown at its beginning is told from there on."""


class OutsideAttempts(NamedTuple):
    """Attempts that held nothing within the time that is asked for."""

    num_outside: int
    num_attempts: int
    """All attempts of the store that ever started."""
    first_s: float
    last_s: float
    """From when to when attempts ran."""


class FleetReport(NamedTuple):
    """Everything that a report tells."""

    account: GpuHourAccount
    fleet_goodput: GoodputBreakdown
    group_by: str
    groups: tuple[GoodputBreakdown, ...]
    other_groups: dict[str, tuple[GoodputBreakdown, ...]]
    """Goodput by other things, for the page."""
    savings: tuple[PotentialSaving, ...]
    mean_dollars_per_gpu_hour: float | None
    price_sources: tuple[str, ...]
    trend: tuple[TrendPoint, ...]
    complete_periods: tuple[TrendPoint, ...]
    """Of the trend, the days that are whole."""
    forecasts: dict[str, Forecast]
    previous: GpuHourAccount | None = None
    """The same length of time right before, where it is asked for."""
    outside: OutsideAttempts | None = None
    """What the time asked for leaves out of the store."""

    @property
    def forecast_bucket(self) -> str:
        """What is worth a forecast: no work that is merely assumed, no GPUs that nobody tells."""
        if not self.fleet_goodput.allocated_hours:
            return ""
        if 2 * self.fleet_goodput.unknown_hours < self.fleet_goodput.allocated_hours:
            return "productive"
        return "allocated" if self.fleet_goodput.scheduling_goodput is not None else ""

    @property
    def forecast(self) -> Forecast | None:
        """Its forecast."""
        return self.forecasts.get(self.forecast_bucket)


def build_report(found: GpuHourAccount, prices: GpuPrices, by: str, top: int) -> FleetReport:
    """Work out what a report tells."""
    steps = select_complete_periods(found)
    series = {
        "allocated": [
            1 - sum(row.shares[b.name] for b in BUCKETS if not b.allocated) for row in steps
        ],
        "productive": [row.shares["productive"] for row in steps],
    }
    forecasts = {
        name: made for name, one in series.items() if (made := forecast(one, high=1.0)) is not None
    }
    other = [kind for kind in ("user", "team", "partition", "workload") if kind != by]
    return FleetReport(
        found, compute_fleet_goodput(found), by, compute_goodput(found, by, top),
        {kind: compute_goodput(found, kind, top) for kind in other}, rank_savings(found, prices,
        _owner(by)),
        mean_gpu_price(found, prices), describe_price_sources(found, prices), build_trend(found),
        steps,
        forecasts,
    )  # fmt: skip


def _owner(by: str) -> str:
    return "team" if by == "team" else "user"


def list_caveats(report: FleetReport) -> list[str]:
    """Say what a reader should beware of."""
    found = report.account
    told = []
    if not found.capacity:
        told.append("nothing is known of this time; mw fleet ingest says what the store holds")
    if found.capacity and found.first_job_ms == found.window.until_ms:
        told.append("no job is known of this time: all that was up counts as free")
    elif found.first_job_ms - found.first_known_ms > NOTABLE_SHARE * (
        found.window.until_ms - found.first_known_ms
    ):
        told.append(
            f"no job is known before {format_day(found.first_job_ms / 1e3)}: what was free until "
            f"then may be "
            "what nobody recorded"
        )
    if found.inferred_capacity:
        share = 100 * found.inferred_capacity / max(1, found.capacity)
        told.append(
            f"{to_gpu_hours(found.inferred_capacity):,.1f} GPU-hours ({share:.1f} %) lie where no "
            f"nodes are told: "
            "what jobs held stands for what there was, and nothing is free there; --gpus N tells it"
        )
    if found.assumed_uptime:
        share = 100 * found.assumed_uptime / max(1, found.capacity)
        told.append(
            f"{to_gpu_hours(found.assumed_uptime):,.1f} GPU-hours ({share:.1f} %) are of nodes "
            f"before anything "
            "is told of their state: they are taken to be up from the first job on them"
        )
    if to_gpu_hours(found.oversubscribed) > 0.05:
        told.append(
            f"jobs claim {to_gpu_hours(found.oversubscribed):,.1f} GPU-hours more than there were "
            f"(nodes that were "
            "down, GPUs claimed twice); these are cut and in no bucket"
        )
    unsaved = sum(v for c, v in found.sum_cells().items() if c == ("lost_work", "unknown"))
    if to_gpu_hours(unsaved) > 0.05:
        told.append(
            f"{to_gpu_hours(unsaved):,.1f} of the lost hours are whole attempts: no checkpoint of "
            f"them is "
            "known"
        )
    if report.outside is not None and report.outside.num_outside:
        told.append(_describe_outside(report.outside))
    told += [f"{count:,} {what}" for what, count in found.data_warnings.items()]
    if report.price_sources:
        told.append(f"prices per GPU-hour: {'; '.join(report.price_sources)}")
    elif report.mean_dollars_per_gpu_hour is None and found.capacity:
        told.append("no price is known for these GPUs; --price 2.5 tells one")
    return told


def _describe_outside(outside: OutsideAttempts) -> str:
    since = format_day(outside.first_s // 86_400 * 86_400)
    quoted = f"'{since}'" if " " in since else since
    count = f"{outside.num_outside:,} of {outside.num_attempts:,}"
    span = f"{format_day(outside.first_s)} to {format_day(outside.last_s)}"
    return (
        f"{count} attempts lie outside of this time: all ran from {span}; "
        f"--since {quoted} takes all of it"
    )


def report_to_data(report: FleetReport) -> dict[str, Any]:
    """Return the whole report as plain data."""
    found = report.account
    whole = max(1, found.capacity)
    return {
        "since_s": found.window.since_ms / 1e3,
        "until_s": found.window.until_ms / 1e3,
        "first_known_s": found.first_known_ms / 1e3,
        "clusters": sorted(found.attempts.cluster.values),
        "gpu_hours": to_gpu_hours(found.capacity),
        "allocated_gpu_hours": to_gpu_hours(found.allocated),
        "inferred_capacity_gpu_hours": to_gpu_hours(found.inferred_capacity),
        "assumed_uptime_gpu_hours": to_gpu_hours(found.assumed_uptime),
        "oversubscribed_gpu_hours": to_gpu_hours(found.oversubscribed),
        "mean_dollars_per_gpu_hour": report.mean_dollars_per_gpu_hour,
        "price_sources": list(report.price_sources),
        "buckets": {
            name: {
                "title": BUCKET_TITLES[name], "gpu_hours": to_gpu_hours(amount),
                "share": amount / whole,
                "dollars": None if report.mean_dollars_per_gpu_hour is None
                else to_gpu_hours(amount) * report.mean_dollars_per_gpu_hour,
                "by_evidence": {
                    cell.evidence: to_gpu_hours(part) for cell, part in found.sum_cells().items()
                    if cell.bucket == name and part
                },
            }
            for name, amount in found.sum_buckets().items()
        },
        "previous": None if report.previous is None else {
            "since_s": report.previous.window.since_ms / 1e3,
            "gpu_hours": to_gpu_hours(report.previous.capacity),
            "buckets": {n: to_gpu_hours(amount) for n,
            amount in report.previous.sum_buckets().items()},
        },
        "goodput": goodput_to_data(report.fleet_goodput),
        "groups": {report.group_by: [goodput_to_data(one) for one in report.groups]}
        | {kind: [goodput_to_data(one) for one in some] for kind,
        some in report.other_groups.items()},
        "savings": [row._asdict() for row in report.savings],
        "savings_by_remedy": [row._asdict() for row in group_by_remedy(report.savings)],
        "savings_by_owner": [row._asdict() for row in group_by_owner(report.savings)],
        "trend": [row._asdict() for row in report.trend],
        "forecasts": {name: made._asdict() for name, made in report.forecasts.items()},
        "attempts_outside": None if report.outside is None else report.outside._asdict(),
        "notes": list_caveats(report),
    }  # fmt: skip


def goodput_to_data(one: GoodputBreakdown) -> dict[str, Any]:
    """Return goodput as plain data."""
    return {**one._asdict(), "goodput": one.goodput}
