"""`mw fleet patterns`: named inefficiencies of a fleet, costliest first, and reports to owners."""

import argparse
import re
from pathlib import Path
from typing import Any

from meshwright.cli.flags.time_range import add_times
from meshwright.cli.fleet.flags import add_store, open_store, read_scope
from meshwright.cli.result import CommandResult, FieldsView, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.fleet.account.prices import GpuPrices, parse_prices
from meshwright.fleet.patterns import (
    FleetFinding,
    find_inefficiencies,
    finding_to_data,
    list_patterns,
    load_fleet_data,
    write_owner_reports,
)
from meshwright.fleet.patterns.evidence_text import format_hours
from meshwright.fleet.time_format import format_range
from meshwright.spec.name_suggestions import find_closest_names
from meshwright.spec.units import format_quantity, parse_count

EXAMPLES = (
    "mw fleet patterns",
    "mw fleet patterns --since 30d --price h100=2.9 --top 40",
    "mw fleet patterns --pattern cpu-starved",
    "mw fleet patterns --messages reports/ --redact",
)

MIN_SAMPLED_SHARE = 0.1
"""Where a smaller part of the hours is sampled, that is said."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_times(parser, "7d")
    parser.add_argument("--pattern", metavar="NAME", help="only this one, with all its evidence")
    parser.add_argument("--owner", metavar="NAME", help="only what this user can change")
    parser.add_argument("--top", default="15", metavar="N", help="how many (default: 15)")
    parser.add_argument(
        "--price", metavar="DOLLARS",
        help="of a GPU-hour: 2.5, or h100=2.9,a100=1.4 (default: the catalog's)",
    )  # fmt: skip
    parser.add_argument("--messages", metavar="FOLDER", help="write a report to each owner there")
    parser.add_argument("--cluster", metavar="NAME", help="only this one")
    parser.add_argument(
        "--redact", action="store_true", help="pseudonyms for users and names of jobs"
    )
    add_store(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what is found."""
    top, prices = parse_count(args.top, "--top"), parse_prices(args.price)
    _require(args.pattern)
    with open_store(args) as store:
        scope = read_scope(store, args)
        fleet = load_fleet_data(
            store,
            since_s=scope.since_s,
            until_s=scope.until_s,
            where=scope.where,
            redact=args.redact,
        )
    found = tuple(
        one
        for one in find_inefficiencies(fleet, lambda kind: _dollars(prices, kind))
        if args.pattern in (None, one.name) and args.owner in (None, one.owner)
    )
    period = format_range(scope.since_s, scope.until_s)
    written = _write(args.messages, write_owner_reports(found, period)) if args.messages else ()
    allocated_hours = float(fleet.jobs.gpu_hours.sum())
    sampled_hours = float(fleet.utilization.gpu_hours[fleet.sampled_uses].sum())
    data: dict[str, Any] = {
        "since_s": scope.since_s,
        "until_s": scope.until_s,
        "allocated_gpu_hours": allocated_hours,
        "sampled_gpu_hours": sampled_hours,
        "findings": [finding_to_data(one) for one in found],
        "messages": list(written),
    }
    views = (
        _details(found, top)
        if args.pattern
        else _screen(found, top, period, allocated_hours, sampled_hours)
    )
    notes = (
        (NoteView(f"wrote {format_quantity(len(written), 'report')} to {args.messages}"),)
        if args.messages
        else ()
    )
    quiet = tuple(f"{one.name}\t{one.owner}\t{one.gpu_hours or 0:.1f}" for one in found)
    return CommandResult("fleet-patterns/2", data, (*views, *notes), quiet)


def _require(name: str | None) -> None:
    known = [one.name for one in list_patterns()]
    if name is not None and name not in known:
        close = find_closest_names(name, known)
        fix = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
        raise InputError([Problem("--pattern", f"there is no pattern {name!r}", fix)])


def _dollars(prices: GpuPrices, kind: str) -> float | None:
    price = prices.find(kind or None)
    return None if price is None else price.dollars_per_hour


def _screen(
    found: tuple[FleetFinding, ...],
    top: int,
    period: str,
    allocated_hours: float,
    sampled_hours: float,
) -> tuple[View, ...]:
    priced = [one for one in found if one.gpu_hours is not None]
    total = sum(one.gpu_hours or 0.0 for one in priced)
    money = sum(one.dollars or 0.0 for one in priced)
    sampled_share = sampled_hours / allocated_hours if allocated_hours else 0.0
    head = make_fields(
        {
            "time": period,
            "held": f"{format_hours(allocated_hours)} GPU-hours, {sampled_share:.0%} of them "
            "sampled",
            "found": f"{format_quantity(len(found), 'finding')} of "
            f"{format_quantity(len({one.name for one in found}), 'pattern')}, "
            f"{format_hours(total)} GPU-hours" + (f", ${money:,.0f}" if money else ""),
        }
    )
    rows = [
        (
            "" if one.gpu_hours is None else format_hours(one.gpu_hours),
            "" if one.dollars is None else f"{one.dollars:,.0f}",
            one.name, one.owner, one.cases, one.evidence[0] if one.evidence else "",
        )
        for one in found[:top]
    ]  # fmt: skip
    view = make_table("GPU-hours, $, pattern, owner, cases, the costliest", rows,
                 right="GPU-hours, $, cases", wide="the costliest")  # fmt: skip
    notes: list[View] = []
    if allocated_hours and sampled_hours < MIN_SAMPLED_SHARE * allocated_hours:
        what = "few of these hours are sampled, so that most patterns cannot be looked for"
        notes.append(NoteView(f"{what}: mw fleet ingest http://PROMETHEUS:9090"))
    if len(found) > top:
        notes.append(NoteView(f"{len(found) - top} more: --top {len(found)}"))
    if found:
        notes.append(NoteView(f"what to change: mw fleet patterns --pattern {found[0].name}"))
    elif allocated_hours:
        notes.append(NoteView("no pattern is found"))
    return (head, view, *notes) if found else (head, *notes)


def _details(found: tuple[FleetFinding, ...], top: int) -> tuple[View, ...]:
    return tuple(_one(one) for one in found[:top]) or (NoteView("not found in this time"),)


def _one(one: FleetFinding) -> FieldsView:
    money = "" if one.dollars is None else f", ${one.dollars:,.0f}"
    return make_fields(
        {
            "owner": one.owner + (f" ({one.team})" if one.team else ""),
            "cost": ""
            if one.gpu_hours is None
            else f"{format_hours(one.gpu_hours)} GPU-hours{money}",
            "counted": one.cost_basis,
            "evidence": "\n".join(one.evidence),
            "change": one.remedy,
            "jobs": ", ".join(one.jobs[:20]) + (" …" if len(one.jobs) > 20 else ""),
            "nodes": ", ".join(one.nodes[:20]) + (" …" if len(one.nodes) > 20 else ""),
        },
        one.title,
    )


def _write(folder: str, messages: dict[str, str]) -> tuple[str, ...]:
    """Write a report to each owner; returns the files."""
    home = Path(folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
        written = []
        for owner, text in messages.items():
            # A name from accounting must not lead out of the folder.
            safe = re.sub(r"[^\w.@-]", "_", owner).lstrip(".") or "_"
            path = home / f"{safe}.txt"
            path.write_text(text, encoding="utf-8")
            written.append(str(path))
    except OSError as error:
        what = f"cannot write the reports: {error.strerror or error}"
        raise InputError([Problem(folder, what, "name a folder that can be written")]) from None
    return tuple(written)
