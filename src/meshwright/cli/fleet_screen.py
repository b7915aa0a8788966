"""An account of a fleet as one screen: what `mw fleet report` answers with."""

from collections.abc import Sequence

from meshwright.cli.answer import Answer, Note, Table, View, facts, table
from meshwright.cli.fleet_figures import REMARKABLE, Report, data, notes
from meshwright.cli.fleet_times import day, stretch
from meshwright.observe.fleet.account import BUCKETS, EVIDENCE, TITLES, Account, hours
from meshwright.observe.fleet.account.goodput import Goodput
from meshwright.observe.fleet.account.savings import Saving, by_remedy
from meshwright.spec.units import format_some

MOST_LINES = 40
"""Of a terminal; a screen is never longer."""
_BAR = 24
_MARKS = {"productive": "█", "idle": "·", "lost": "◆"}
_SHORT = {
    "progress": "jobs", "samples": "samples", "accounting": "accounting", "nodes": "nodes",
    "unknown": "unknown",
}  # fmt: skip


def answer(report: Report) -> Answer:
    """Return the data and the screen."""
    views = screen(report)
    return Answer(
        "fleet-report/1", data(report), (*views, *map(Note, notes(report))),
        tuple(
            f"{name}\t{hours(amount):.1f}" for name, amount in report.account.buckets().items()
        ),
    )  # fmt: skip


def screen(report: Report) -> tuple[View, ...]:
    """Return at most one screen of lines."""
    head, where = facts(summary(report)), bucket_table(report)
    # Each table has a line before it, its title, its head and a rule.
    room = max(2, MOST_LINES - len(head.pairs) - len(where.rows) - 3 * 4)
    groups = report.groups[: min(5, (room + 1) // 2)]
    views: list[View] = [head, where]
    if groups:
        views.append(group_table(groups, report.by))
    if report.savings:
        views.append(savings_table(report.savings[: room - len(groups)]))
    return tuple(views)


def summary(report: Report) -> dict[str, str]:
    """Say in a few lines how the fleet fares."""
    found, fleet = report.account, report.fleet
    gpus = format_some(round(found.gpus), "GPU") if found.gpus else "an untold number of GPUs"
    money = "" if report.price is None else f", {_money(hours(found.capacity) * report.price)}"
    told = {
        "fleet": f"{clusters_of(found) or 'without jobs'}: {gpus}, "
        + format_some(fleet.attempts, "attempt of a job", "attempts of jobs"),
        "time": f"{stretch(found.window.since / 1e3, found.window.until / 1e3)}, "
        f"{some_hours(hours(found.capacity))} GPU-hours{money}{_unrecorded(found)}",
        "goodput": _goodput_line(fleet),
        "ETTR": "nobody tells how long jobs waited" if fleet.ettr is None else
        f"{at_most(fleet.ettr, fleet)} of the time from asking to the end was work"
        + _unknown(fleet),
    }  # fmt: skip
    ahead = report.ahead
    if ahead is not None:
        mean = sum(ahead.values) / len(ahead.values)
        told["next week"] = (
            f"{100 * mean:.1f} % {report.ahead_of} ({ahead.rule}; such forecasts were off by "
            f"{100 * ahead.error:.1f} points, {ahead.tested} tested)"
        )
    if report.before is not None:
        told["before"] = changes(report)
    back = by_remedy(report.savings)
    if back:
        whole = sum(row.hours for row in back)
        paid = [row.dollars for row in back]
        cost = "" if None in paid else f", {_money(sum(d for d in paid if d is not None))}"
        told["to win back"] = (
            f"at most {some_hours(whole)} GPU-hours "
            f"({_percent(whole / max(1e-9, hours(found.capacity)))}{cost}); first: {back[0].remedy}"
        )
    return told


def _unrecorded(found: Account) -> str:
    """Say from when on anything is known, where that is not the whole time."""
    window = found.window
    if not found.capacity or found.known_from - window.since <= REMARKABLE * window.span:
        return ""
    return f"; nothing is known before {day(found.known_from / 1e3)}"


def clusters_of(found: Account) -> str:
    """Name the clusters, the first of them where there are many."""
    every = sorted(found.attempts.cluster.values)
    return ", ".join(every) if len(every) <= 3 else f"{every[0]} and {len(every) - 1} more clusters"


def changes(report: Report) -> str:
    """Say which buckets moved most against the time before, in points of all hours."""
    now, before = report.account, report.before
    if before is None or not before.capacity or not now.capacity:
        return "nothing is known of the same length of time before"
    old, moved = before.buckets(), {}
    for name, amount in now.buckets().items():
        moved[name] = 100 * (amount / now.capacity - old[name] / before.capacity)
    most = sorted(moved, key=lambda name: -abs(moved[name]))[:4]
    return (
        ", ".join(f"{TITLES[name]} {moved[name]:+.1f}" for name in most if abs(moved[name]) >= 0.05)
        + " points against the same length of time before"
    )


def _goodput_line(fleet: Goodput) -> str:
    parts = (
        f"scheduling {_percent(fleet.scheduling) or '?'} × runtime {at_most(fleet.runtime, fleet)}"
    )
    if fleet.program is None:
        return f"{parts}; no job tells its MFU and no sample its tensor activity"
    by = "MFU" if fleet.program_by == "mfu" else "tensor activity"
    return (
        f"{parts} × {by} {_percent(fleet.program)} (of {fleet.program_hours:,.0f} h) "
        f"= {at_most(fleet.goodput, fleet)}".replace("= ≤", "≤")
    )


def _unknown(fleet: Goodput) -> str:
    if fleet.unknown_hours <= 0:
        return ""
    return f", {some_hours(fleet.unknown_hours)} h of which merely assumed"


def bucket_table(report: Report) -> Table:
    """Return hours by bucket with what they are known by."""
    found = report.account
    cells, whole = found.cells(), max(1, found.capacity)
    rows = []
    for bucket in BUCKETS:
        mine = {
            cell.evidence: amount for cell, amount in cells.items()
            if cell.bucket == bucket.name and amount
        }  # fmt: skip
        amount = sum(mine.values())
        if not amount:
            continue
        mark = _MARKS.get(bucket.name, "▒" if bucket.held else "░")
        money = "" if report.price is None else _money(hours(amount) * report.price)
        rows.append(
            (
                bucket.title, f"{hours(amount):,.1f}", f"{100 * amount / whole:.1f}",
                mark * round(_BAR * amount / whole), money, _known_by(mine, amount),
            )
        )  # fmt: skip
    return table(
        "bucket, GPU-hours, %, share, cost, known by", rows, "Where the GPU-hours went",
        right="GPU-hours, %, cost", bars="share", wide="known by",
    )  # fmt: skip


def _known_by(mine: dict[str, int], amount: int) -> str:
    if len(mine) == 1:
        return _SHORT[next(iter(mine))]
    return ", ".join(
        f"{_SHORT[name]} {100 * mine[name] / amount:.0f} %" for name in EVIDENCE if name in mine
    )


def group_table(groups: Sequence[Goodput], by: str) -> Table:
    """Return goodput by owner."""
    rows = [
        (
            one.name or "(not told)", f"{one.held_hours:,.1f}",
            "?" if one.ettr is None else f"{one.waited_hours:,.1f}",
            at_most(one.runtime, one) if one.held_hours else "",
            f"{one.hours['idle']:,.1f}", f"{one.hours['lost']:,.1f}",
            "" if one.program is None else f"{_percent(one.program)} {one.program_by}",
            at_most(one.ettr, one),
        )
        for one in groups
    ]  # fmt: skip
    return table(
        f"{by}, GPU-hours, waited, runtime, idle, lost, program, ETTR", rows,
        f"Goodput by {by}", right="GPU-hours, waited, runtime, idle, lost, program, ETTR",
    )  # fmt: skip


def savings_table(
    rows: Sequence[Saving], title: str = "What would give most back, at most",
    columns: str = "owner, remedy, GPU-hours, worth, by",
) -> Table:  # fmt: skip
    """Return what remedies would give back."""
    shown = [
        (
            row.owner or "(not told)", row.remedy, f"{row.hours:,.1f}",
            "" if row.dollars is None else _money(row.dollars), row.about,
        )
        for row in rows
    ]  # fmt: skip
    return table(columns, shown, title, right="GPU-hours, worth", wide="by")


def some_hours(amount: float) -> str:
    """Write hours, whole ones where they are many."""
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.3g}"


def at_most(share: float | None, one: Goodput) -> str:
    """Write a share that counts as productive what nothing tells about: it is that at most."""
    mark = "≤ " if one.unknown_hours > 0.005 * one.held_hours else ""
    return f"{mark}{_percent(share)}" if share is not None else "?"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _money(dollars: float) -> str:
    return f"${dollars:,.0f}"
