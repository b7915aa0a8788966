"""An account of a fleet as one screen: what `mw fleet report` answers with."""

from collections.abc import Sequence

from meshwright.cli.result import CommandResult, NoteView, TableView, View, make_fields, make_table
from meshwright.fleet.account import (
    BUCKET_TITLES,
    BUCKETS,
    EVIDENCE_TITLES,
    GpuHourAccount,
    to_gpu_hours,
)
from meshwright.fleet.account.goodput import GoodputBreakdown
from meshwright.fleet.account.report import NOTABLE_SHARE, FleetReport, list_caveats, report_to_data
from meshwright.fleet.account.savings import PotentialSaving, group_by_remedy
from meshwright.fleet.time_format import format_day, format_range
from meshwright.spec.units import format_quantity

MAX_LINES = 40
"""Of a terminal; a screen is never longer."""
_BAR = 24
_NOTHING_MEASURED = 0.995
"""Of held hours: where so many are not measured, a share of the others tells nothing."""
_MARKS = {"productive": "█", "idle": "·", "lost_work": "◆"}
_SHORT = {
    "progress": "jobs", "samples": "samples", "accounting": "accounting", "nodes": "nodes",
    "unknown": "unknown",
}  # fmt: skip


def make_result(report: FleetReport) -> CommandResult:
    """Return the data and the screen."""
    views = render_report(report)
    return CommandResult(
        "fleet-report/2", report_to_data(report), (*views, *map(NoteView, list_caveats(report))),
        tuple(
            f"{name}\t{to_gpu_hours(amount):.1f}" for name,
            amount in report.account.sum_buckets().items()
        ),
    )  # fmt: skip


def render_report(report: FleetReport) -> tuple[View, ...]:
    """Return at most one screen of lines."""
    head, where = make_fields(summarize_report(report)), render_bucket_table(report)
    # Each table has a line before it, its title, its head and a rule.
    room = max(2, MAX_LINES - len(head.fields) - len(where.rows) - 3 * 4)
    groups = report.groups[: min(5, (room + 1) // 2)]
    views: list[View] = [head, where]
    if groups:
        views.append(render_group_table(groups, report.group_by))
    if report.savings:
        views.append(render_savings_table(report.savings[: room - len(groups)]))
    return tuple(views)


def summarize_report(report: FleetReport) -> dict[str, str]:
    """Say in a few lines how the fleet fares."""
    found, fleet = report.account, report.fleet_goodput
    gpus = (
        format_quantity(round(found.peak_gpus), "GPU")
        if found.peak_gpus
        else "an untold number of GPUs"
    )
    money = (
        ""
        if report.mean_dollars_per_gpu_hour is None
        else f", {_money(to_gpu_hours(found.capacity) * report.mean_dollars_per_gpu_hour)}"
    )
    told = {
        "fleet": f"{format_clusters(found) or 'without jobs'}: {gpus}, "
        + format_quantity(fleet.num_attempts, "attempt of a job", "attempts of jobs"),
        "time": f"{format_range(found.window.since_ms / 1e3, found.window.until_ms / 1e3)}, "
        f"{format_hours(to_gpu_hours(found.capacity))} GPU-hours{money}{_unrecorded(found)}",
        "goodput": _goodput_line(fleet),
        "ETTR": "nobody tells how long jobs waited" if fleet.ettr is None else
        f"{format_upper_bound(fleet.ettr, fleet)} of the time from asking to the end was work"
        + _unknown(fleet),
    }  # fmt: skip
    ahead = report.forecast
    if ahead is not None:
        mean = sum(ahead.values) / len(ahead.values)
        told["next week"] = (
            f"{100 * mean:.1f} % {report.forecast_bucket} ({ahead.rule}; such forecasts were off "
            f"by "
            f"{100 * ahead.error:.1f} points, {ahead.num_tests} tested)"
        )
    if report.previous is not None:
        told["before"] = describe_changes(report)
    back = group_by_remedy(report.savings)
    if back:
        whole = sum(row.hours for row in back)
        paid = [row.dollars for row in back]
        cost = "" if None in paid else f", {_money(sum(d for d in paid if d is not None))}"
        told["to win back"] = (
            f"at most {format_hours(whole)} GPU-hours "
            f"({_percent(whole / max(1e-9, to_gpu_hours(found.capacity)))}{cost}); first: "
            f"{back[0].remedy}"
        )
    return told


def _unrecorded(found: GpuHourAccount) -> str:
    """Say from when on anything is known, where that is not the whole time."""
    window = found.window
    if (
        not found.capacity
        or found.first_known_ms - window.since_ms <= NOTABLE_SHARE * window.duration_ms
    ):
        return ""
    return f"; nothing is known before {format_day(found.first_known_ms / 1e3)}"


def format_clusters(found: GpuHourAccount) -> str:
    """Name the clusters, the first of them where there are many."""
    every = sorted(found.attempts.cluster.values)
    return ", ".join(every) if len(every) <= 3 else f"{every[0]} and {len(every) - 1} more clusters"


def describe_changes(report: FleetReport) -> str:
    """Say which buckets moved most against the time before, in points of all hours."""
    now, before = report.account, report.previous
    if before is None or not before.capacity or not now.capacity:
        return "nothing is known of the same length of time before"
    old, moved = before.sum_buckets(), {}
    for name, amount in now.sum_buckets().items():
        moved[name] = 100 * (amount / now.capacity - old[name] / before.capacity)
    most = sorted(moved, key=lambda name: -abs(moved[name]))[:4]
    return (
        ", ".join(
            f"{BUCKET_TITLES[name]} {moved[name]:+.1f}" for name in most if abs(moved[name]) >= 0.05
        )
        + " points against the same length of time before"
    )


def _goodput_line(fleet: GoodputBreakdown) -> str:
    parts = (
        f"scheduling {_percent(fleet.scheduling_goodput) or '?'} × runtime "
        f"{format_runtime(fleet) or '?'}"
    )
    if fleet.program_goodput is None:
        return f"{parts}; no job tells its MFU and no sample its tensor activity"
    by = "MFU" if fleet.program_metric == "mfu" else "tensor activity"
    return (
        f"{parts} × {by} {_percent(fleet.program_goodput)} (of {fleet.program_hours:,.0f} h) "
        f"= {format_upper_bound(fleet.goodput, fleet)}".replace("= ≤", "≤")
    )


def _unknown(fleet: GoodputBreakdown) -> str:
    if fleet.unknown_hours <= 0:
        return ""
    return f", {format_hours(fleet.unknown_hours)} h of which merely assumed"


def render_bucket_table(report: FleetReport) -> TableView:
    """Return hours by bucket with what they are known by."""
    found = report.account
    cells, whole = found.sum_cells(), max(1, found.capacity)
    rows = []
    for bucket in BUCKETS:
        mine = {
            cell.evidence: amount for cell, amount in cells.items()
            if cell.bucket == bucket.name and amount
        }  # fmt: skip
        amount = sum(mine.values())
        if not amount:
            continue
        mark = _MARKS.get(bucket.name, "▒" if bucket.allocated else "░")
        money = (
            ""
            if report.mean_dollars_per_gpu_hour is None
            else _money(to_gpu_hours(amount) * report.mean_dollars_per_gpu_hour)
        )
        rows.append(
            (
                bucket.title, f"{to_gpu_hours(amount):,.1f}", f"{100 * amount / whole:.1f}",
                mark * round(_BAR * amount / whole), money, _known_by(mine, amount),
            )
        )  # fmt: skip
    return make_table(
        "bucket, GPU-hours, %, share, cost, known by", rows, "Where the GPU-hours went",
        right="GPU-hours, %, cost", bars="share", wide="known by",
    )  # fmt: skip


def _known_by(mine: dict[str, int], amount: int) -> str:
    if len(mine) == 1:
        return _SHORT[next(iter(mine))]
    return ", ".join(
        f"{_SHORT[name]} {100 * mine[name] / amount:.0f} %"
        for name in EVIDENCE_TITLES
        if name in mine
    )


def render_group_table(groups: Sequence[GoodputBreakdown], by: str) -> TableView:
    """Return goodput by owner."""
    rows = [
        (
            one.name or "(not told)", f"{one.allocated_hours:,.1f}",
            "?" if one.ettr is None else f"{one.pending_hours:,.1f}",
            format_runtime(one),
            f"{one.hours_by_bucket['idle']:,.1f}", f"{one.hours_by_bucket['lost_work']:,.1f}",
            "" if one.program_goodput is None else f"{_percent(one.program_goodput)} "
                                                   f"{one.program_metric}",
            format_upper_bound(one.ettr, one),
        )
        for one in groups
    ]  # fmt: skip
    return make_table(
        f"{by}, GPU-hours, waited, runtime, idle, lost, program, ETTR", rows,
        f"Goodput by {by}", right="GPU-hours, waited, runtime, idle, lost, program, ETTR",
    )  # fmt: skip


def render_savings_table(
    rows: Sequence[PotentialSaving], title: str = "What would give most back, at most",
    columns: str = "owner, remedy, GPU-hours, worth, by",
) -> TableView:  # fmt: skip
    """Return what remedies would give back."""
    shown = [
        (
            row.owner or "(not told)", row.remedy, f"{row.hours:,.1f}",
            "" if row.dollars is None else _money(row.dollars), row.description,
        )
        for row in rows
    ]  # fmt: skip
    return make_table(columns, shown, title, right="GPU-hours, worth", wide="by")


def format_hours(amount: float) -> str:
    """Write hours, whole ones where they are many."""
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.3g}"


def format_runtime(one: GoodputBreakdown) -> str:
    """Write runtime goodput, where anything was measured that it could rest on."""
    if one.unknown_hours >= _NOTHING_MEASURED * one.allocated_hours:
        return "not measured" if one.allocated_hours else ""
    return format_upper_bound(one.runtime_goodput, one)


def format_upper_bound(share: float | None, one: GoodputBreakdown) -> str:
    """Write a share that counts as productive what nothing tells about: it is that at most."""
    mark = "≤ " if one.unknown_hours > 0.005 * one.allocated_hours else ""
    return f"{mark}{_percent(share)}" if share is not None else "?"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _money(dollars: float) -> str:
    return f"${dollars:,.0f}"
