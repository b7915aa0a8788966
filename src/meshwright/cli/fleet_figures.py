"""What a report on a fleet tells, worked out and as plain data."""

from typing import Any, NamedTuple

from meshwright.cli.fleet_times import day
from meshwright.observe.fleet.account import BUCKETS, TITLES, Account, hours
from meshwright.observe.fleet.account.goodput import Goodput, fleet_goodput, goodput
from meshwright.observe.fleet.account.prices import Prices
from meshwright.observe.fleet.account.savings import (
    Saving,
    by_owner,
    by_remedy,
    fleet_price,
    price_sources,
    savings,
)
from meshwright.observe.fleet.account.trend import Forecast, Trend, forecast, trend, whole_steps

REMARKABLE = 0.02
"""Of the time asked for: what is unknown at its beginning is told from there on."""


class Report(NamedTuple):
    """Everything that a report tells."""

    account: Account
    fleet: Goodput
    by: str
    groups: tuple[Goodput, ...]
    more: dict[str, tuple[Goodput, ...]]
    """Goodput by other things, for the page."""
    savings: tuple[Saving, ...]
    price: float | None
    sources: tuple[str, ...]
    trend: tuple[Trend, ...]
    whole: tuple[Trend, ...]
    """Of the trend, the days that are whole."""
    forecasts: dict[str, Forecast]
    before: Account | None = None
    """The same length of time right before, where it is asked for."""

    @property
    def ahead_of(self) -> str:
        """What is worth a forecast: no work that is merely assumed, no GPUs that nobody tells."""
        if not self.fleet.held_hours:
            return ""
        if 2 * self.fleet.unknown_hours < self.fleet.held_hours:
            return "productive"
        return "held" if self.fleet.scheduling is not None else ""

    @property
    def ahead(self) -> Forecast | None:
        """Its forecast."""
        return self.forecasts.get(self.ahead_of)


def report_of(found: Account, prices: Prices, by: str, top: int) -> Report:
    """Work out what a report tells."""
    steps = whole_steps(found)
    series = {
        "held": [1 - sum(row.shares[b.name] for b in BUCKETS if not b.held) for row in steps],
        "productive": [row.shares["productive"] for row in steps],
    }
    forecasts = {
        name: made for name, one in series.items() if (made := forecast(one, high=1.0)) is not None
    }
    other = [kind for kind in ("user", "team", "partition", "work") if kind != by]
    return Report(
        found, fleet_goodput(found), by, goodput(found, by, top),
        {kind: goodput(found, kind, top) for kind in other}, savings(found, prices, _owner(by)),
        fleet_price(found, prices), price_sources(found, prices), trend(found), steps,
        forecasts,
    )  # fmt: skip


def _owner(by: str) -> str:
    return "team" if by == "team" else "user"


def notes(report: Report) -> list[str]:
    """Say what a reader should beware of."""
    found = report.account
    told = []
    if not found.capacity:
        told.append("nothing is known of this time; mw fleet ingest says what the store holds")
    if found.capacity and found.jobs_from == found.window.until:
        told.append("no job is known of this time: all that was up counts as free")
    elif found.jobs_from - found.known_from > REMARKABLE * (found.window.until - found.known_from):
        told.append(
            f"no job is known before {day(found.jobs_from / 1e3)}: what was free until then may be "
            "what nobody recorded"
        )
    if found.inferred:
        share = 100 * found.inferred / max(1, found.capacity)
        told.append(
            f"{hours(found.inferred):,.1f} GPU-hours ({share:.1f} %) lie where no nodes are told: "
            "what jobs held stands for what there was, and nothing is free there; --gpus N tells it"
        )
    if found.assumed:
        share = 100 * found.assumed / max(1, found.capacity)
        told.append(
            f"{hours(found.assumed):,.1f} GPU-hours ({share:.1f} %) are of nodes before anything "
            "is told of their state: they are taken to be up from the first job on them"
        )
    if hours(found.cut) > 0.05:
        told.append(
            f"jobs claim {hours(found.cut):,.1f} GPU-hours more than there were (nodes that were "
            "down, GPUs claimed twice); these are cut and in no bucket"
        )
    unsaved = sum(v for c, v in found.cells().items() if c == ("lost", "unknown"))
    if hours(unsaved) > 0.05:
        told.append(
            f"{hours(unsaved):,.1f} of the lost hours are whole attempts: no checkpoint of them is "
            "known"
        )
    told += [f"{count:,} {what}" for what, count in found.oddities.items()]
    if report.sources:
        told.append(f"prices per GPU-hour: {'; '.join(report.sources)}")
    elif report.price is None and found.capacity:
        told.append("no price is known for these GPUs; --price 2.5 tells one")
    return told


def data(report: Report) -> dict[str, Any]:
    """Return the whole report as plain data."""
    found = report.account
    whole = max(1, found.capacity)
    return {
        "since_s": found.window.since / 1e3,
        "until_s": found.window.until / 1e3,
        "known_from_s": found.known_from / 1e3,
        "clusters": sorted(found.attempts.cluster.values),
        "gpu_hours": hours(found.capacity),
        "held_gpu_hours": hours(found.held),
        "gpu_hours_inferred": hours(found.inferred),
        "gpu_hours_assumed": hours(found.assumed),
        "gpu_hours_cut": hours(found.cut),
        "price_per_gpu_hour": report.price,
        "price_sources": list(report.sources),
        "buckets": {
            name: {
                "title": TITLES[name], "gpu_hours": hours(amount), "share": amount / whole,
                "dollars": None if report.price is None else hours(amount) * report.price,
                "by_evidence": {
                    cell.evidence: hours(part) for cell, part in found.cells().items()
                    if cell.bucket == name and part
                },
            }
            for name, amount in found.buckets().items()
        },
        "before": None if report.before is None else {
            "since_s": report.before.window.since / 1e3,
            "gpu_hours": hours(report.before.capacity),
            "buckets": {n: hours(amount) for n, amount in report.before.buckets().items()},
        },
        "goodput": group_data(report.fleet),
        "by": {report.by: [group_data(one) for one in report.groups]}
        | {kind: [group_data(one) for one in some] for kind, some in report.more.items()},
        "savings": [row._asdict() for row in report.savings],
        "savings_by_remedy": [row._asdict() for row in by_remedy(report.savings)],
        "savings_by_owner": [row._asdict() for row in by_owner(report.savings)],
        "trend": [row._asdict() for row in report.trend],
        "forecasts": {name: made._asdict() for name, made in report.forecasts.items()},
        "notes": notes(report),
    }  # fmt: skip


def group_data(one: Goodput) -> dict[str, Any]:
    """Return goodput as plain data."""
    return {**one._asdict(), "goodput": one.goodput}
