"""The page of `mw fleet report --html`: a week of a fleet for somebody who runs no jobs on it."""

from datetime import UTC, datetime
from html import escape

from meshwright import __version__
from meshwright.cli.fleet.report_screen import (
    format_clusters,
    format_hours,
    render_bucket_table,
    render_group_table,
    render_savings_table,
    summarize_report,
)
from meshwright.cli.render.html import render_fields, render_page, render_view
from meshwright.cli.result import TableView
from meshwright.fleet.account import BUCKETS, EVIDENCE_TITLES, to_gpu_hours
from meshwright.fleet.account.report import FleetReport, list_caveats
from meshwright.fleet.account.savings import group_by_owner, group_by_remedy
from meshwright.fleet.account.trend import Forecast, TrendPoint
from meshwright.fleet.time_format import format_day, is_calendar_time

BUCKET_COLORS = {
    "productive": "var(--path)",
    "unmeasured": "color-mix(in srgb, var(--path) 34%, var(--ground))",
    "startup": "var(--cause-4)",
    "checkpoint": "var(--copies)",
    "data_wait": "var(--cause-2)",
    "communication": "var(--communication)",
    "idle": "var(--warn)",
    "lost_work": "var(--cause-1)",
    "down": "var(--ink)",
    "draining": "var(--soft)",
    "fragmented": "var(--compute)",
    "queue_order": "color-mix(in srgb, var(--compute) 72%, var(--ground))",
    "quota": "color-mix(in srgb, var(--compute) 52%, var(--ground))",
    "insufficient_gpus": "color-mix(in srgb, var(--compute) 36%, var(--ground))",
    "reserved": "var(--cause-3)",
    "no_demand": "var(--idle)",
    "unknown": "var(--cause-5)",
}
"""Of `render/style.css`: green is work, warm is what jobs waste, blue is what waits for a job."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1120, 210, 44, 24
_MOST_LABELS = 11


def render_report_page(report: FleetReport) -> str:
    """Return the whole file."""
    found = report.account
    names = format_clusters(found)
    title = (
        f"GPU-hours of {names or 'the fleet'}, {format_day(found.window.since_ms / 1e3)} to "
        + format_day(found.window.until_ms / 1e3)
    )
    owners = [row for row in group_by_owner(report.savings) if row.hours > 0][:10]
    parts = [
        f'<p class="note">mw fleet report, meshwright {__version__}</p>',
        f"<p>{escape(_opening(report))}</p>",
        render_fields(summarize_report(report).items()),
        "<h2>All hours</h2>",
        _whole_bar(report),
        "<h2>Day by day</h2>" if _daily(report) else "<h2>Week by week</h2>",
        draw_trend(report, daily=_daily(report)),
        render_view(_without(render_bucket_table(report), "share")),
        render_view(
            render_savings_table(
                group_by_remedy(report.savings), "What would give hours back, at most",
                "mostly of, remedy, GPU-hours, worth, by",
            )
        ) if owners else "",
        render_view(
            render_savings_table(
                owners, "Whose they are", "owner, first remedy, GPU-hours, worth, by"
            )
        ) if owners else "",
        *(
            render_view(render_group_table(groups[:10], kind))
            for kind, groups in ((report.group_by, report.groups), *report.other_groups.items())
            if any(one.name for one in groups)
        ),
        _definitions(report),
        "<h2>To beware of</h2>" if list_caveats(report) else "",
        "".join(f'<p class="note">{escape(note)}</p>' for note in list_caveats(report)),
    ]  # fmt: skip
    return render_page(title, "\n".join(part for part in parts if part))


def _without(view: TableView, name: str) -> TableView:
    """Leave out a column that is drawn with marks: the page has a bar of its own."""
    at = view.columns.index(name)
    return view._replace(
        columns=view.columns[:at] + view.columns[at + 1 :],
        rows=tuple(row[:at] + row[at + 1 :] for row in view.rows),
    )


def _daily(report: FleetReport) -> bool:
    return all(row.until_s - row.since_s <= 86_400 for row in report.trend)


def _opening(report: FleetReport) -> str:
    """Say the most important in two sentences."""
    found = report.account
    whole = max(1, found.capacity)
    buckets = found.sum_buckets()
    held = {b.name for b in BUCKETS if b.allocated}
    wasted = {
        name: amount for name, amount in buckets.items()
        if name not in ("productive", "unmeasured", "no_demand") and amount
    }  # fmt: skip
    text = (
        f"Of {format_hours(to_gpu_hours(found.capacity))} GPU-hours "
        f"{100 * found.allocated / whole:.0f} % were "
        f"held by jobs and {100 * buckets['productive'] / whole:.0f} % did work that was kept, "
        "as far as is known."
    )
    if report.fleet_goodput.unknown_hours:
        assumed = 100 * report.fleet_goodput.unknown_hours / report.fleet_goodput.allocated_hours
        text += f" Of {assumed:.0f} % of what jobs held nothing tells what it was used for."
    if wasted:
        worst = max(wasted, key=lambda name: wasted[name])
        about = next(bucket for bucket in BUCKETS if bucket.name == worst)
        who = "within jobs" if worst in held else "outside of jobs"
        text += (
            f" Most of the rest that could be used, {format_hours(to_gpu_hours(wasted[worst]))} "
            f"GPU-hours "
            f"{who}, "
            f"was “{about.title}”: {about.description}."
        )
    return text


def _whole_bar(report: FleetReport) -> str:
    found = report.account
    whole = max(1, found.capacity)
    amounts = {name: amount for name, amount in found.sum_buckets().items() if amount}
    keys = "".join(
        f'<span><i style="background:{BUCKET_COLORS[bucket.name]}"></i>{escape(bucket.title)} '
        f"{100 * amounts[bucket.name] / whole:.1f} %</span>"
        for bucket in BUCKETS
        if bucket.name in amounts
    )
    drawn = "".join(
        f'<i style="background:{BUCKET_COLORS[bucket.name]};'
        f'width:{100 * amounts[bucket.name] / whole:.3f}%" title="{escape(bucket.title)}"></i>'
        for bucket in BUCKETS
        if bucket.name in amounts
    )
    style = "display:flex;height:34px;border-radius:4px;overflow:hidden;margin:.2rem 0 .6rem"
    return f'<div style="{style}">{drawn}</div>\n<div class="legend">{keys}</div>'


def draw_trend(report: FleetReport, *, daily: bool) -> str:
    """Draw each day as a column of its buckets, and where productive hours may go on to."""
    ahead = report.forecast
    # A forecast goes on from whole days; without one, days that are cut short are shown too.
    rows = (
        report.complete_periods
        if ahead and daily
        else tuple(r for r in report.trend if r.hours > 0)
    )
    if not rows:
        return ""
    columns = len(rows) + (len(ahead.values) if ahead and daily else 0)
    step = (_WIDTH - _LEFT) / columns
    drawn = [_grid()]
    every = -(-columns // _MOST_LABELS)
    for at, row in enumerate(rows):
        x, y = _LEFT + at * step, float(_HEIGHT)
        for bucket in BUCKETS:
            share = row.shares[bucket.name]
            if share > 0:
                y -= share * _HEIGHT
                drawn.append(
                    f'<rect x="{x + 1:.1f}" y="{y:.2f}" width="{max(0.5, step - 2):.1f}" '
                    f'height="{share * _HEIGHT:.2f}" '
                    f'style="fill:{BUCKET_COLORS[bucket.name]}"><title>'
                    f"{format_day(row.since_s)}: {escape(bucket.title)} {100 * share:.1f} %, "
                    f"{share * row.hours:,.0f} h</title></rect>"
                )
        if at % every == 0:
            drawn.append(_label(x + step / 2, row.since_s))
    if ahead and daily:
        drawn += _ahead(rows, ahead, step, every)
    note = ""
    if ahead and daily:
        note = (
            f'<p class="note">Dots: {report.forecast_bucket} hours to come, {escape(ahead.rule)}; '
            f"the "
            "bars on them are how far such forecasts were off so far "
            f"({100 * ahead.error:.1f} points on the average of {ahead.num_tests}).</p>"
        )
    return (
        f'<svg class="passes" viewBox="0 0 {_WIDTH} {_HEIGHT + _BOTTOM}" role="img" '
        f'aria-label="buckets of each day">{"".join(drawn)}</svg>{note}'
    )


def _grid() -> str:
    return "".join(
        f'<path d="M{_LEFT} {_HEIGHT * (1 - share):.1f}H{_WIDTH}" style="opacity:.35"/>'
        f'<text x="0" y="{_HEIGHT * (1 - share) + (12 if share == 1 else 4):.1f}">'
        f"{100 * share:.0f} %</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
    )


def _ahead(rows: tuple[TrendPoint, ...], ahead: Forecast, step: float, every: int) -> list[str]:
    drawn = []
    last_s = rows[-1].since_s
    for at, value in enumerate(ahead.values):
        x = _LEFT + (len(rows) + at + 0.5) * step
        y, reach = _HEIGHT * (1 - value), _HEIGHT * ahead.error
        top, bottom = max(0.0, y - reach), min(float(_HEIGHT), y + reach)
        colour = BUCKET_COLORS["productive"]
        drawn.append(
            f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" style="stroke:{colour};stroke-width:3;'
            f'opacity:.45"/><circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:{colour}"><title>'
            f"{100 * value:.1f} %</title></circle>"
        )
        if (len(rows) + at) % every == 0:
            drawn.append(_label(x, last_s + (at + 1) * 86_400))
    return drawn


def _label(x: float, moment_s: float) -> str:
    date = datetime.fromtimestamp(moment_s, UTC)
    text = f"{date:%a %d %b}" if is_calendar_time(moment_s) else format_day(moment_s)
    return f'<text x="{x:.1f}" y="{_HEIGHT + 17}" class="tick">{text}</text>'


def _definitions(report: FleetReport) -> str:
    """Say what the words mean, of buckets that there are."""
    amounts = report.account.sum_buckets()
    words = [(bucket.title, bucket.description) for bucket in BUCKETS if amounts[bucket.name]]
    words += [(f"known by {_short(name)}", about) for name, about in EVIDENCE_TITLES.items()]
    return f"<h2>What the words mean</h2>{render_fields(words)}"


def _short(name: str) -> str:
    return {"progress": "jobs"}.get(name, name)
