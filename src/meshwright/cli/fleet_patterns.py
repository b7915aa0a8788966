"""`mw fleet patterns`: named inefficiencies of a fleet, costliest first, and letters to owners."""

import argparse
import re
from pathlib import Path
from typing import Any

from meshwright.cli.answer import Answer, Facts, Note, View, facts, table
from meshwright.cli.fleet_account import asked
from meshwright.cli.fleet_store import add_store, open_store
from meshwright.cli.fleet_times import add_times, stretch
from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.account.prices import Prices, read_prices
from meshwright.observe.fleet.patterns import Told, find, letters, patterns, plain, read
from meshwright.observe.fleet.patterns.say import hours
from meshwright.spec.names import nearest
from meshwright.spec.units import format_some, parse_count

EXAMPLES = (
    "mw fleet patterns",
    "mw fleet patterns --since 30d --price h100=2.9 --top 40",
    "mw fleet patterns --pattern cpu-starved",
    "mw fleet patterns --messages letters/ --redact",
)

SPARSE = 0.1
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
    parser.add_argument("--messages", metavar="FOLDER", help="write a letter to each owner there")
    parser.add_argument("--cluster", metavar="NAME", help="only this one")
    parser.add_argument(
        "--redact", action="store_true", help="pseudonyms for users and names of jobs"
    )
    add_store(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what is found."""
    top, prices = parse_count(args.top, "--top"), read_prices(args.price)
    _require(args.pattern)
    with open_store(args) as store:
        scope = asked(store, args)
        fleet = read(store, since_s=scope.since_s, until_s=scope.until_s, where=scope.where,
                     redact=args.redact)  # fmt: skip
    found = tuple(
        one
        for one in find(fleet, lambda kind: _dollars(prices, kind))
        if args.pattern in (None, one.name) and args.owner in (None, one.owner)
    )
    period = stretch(scope.since_s, scope.until_s)
    written = _write(args.messages, letters(found, period)) if args.messages else ()
    held = float(fleet.jobs.hours.sum())
    seen = float(fleet.uses.hours[fleet.seen].sum())
    data: dict[str, Any] = {
        "since_s": scope.since_s,
        "until_s": scope.until_s,
        "held_gpu_hours": held,
        "sampled_gpu_hours": seen,
        "findings": [plain(one) for one in found],
        "messages": list(written),
    }
    views = _details(found, top) if args.pattern else _screen(found, top, period, held, seen)
    notes = (
        (Note(f"wrote {format_some(len(written), 'letter')} to {args.messages}"),)
        if args.messages
        else ()
    )
    quiet = tuple(f"{one.name}\t{one.owner}\t{one.gpu_hours or 0:.1f}" for one in found)
    return Answer("fleet-patterns/1", data, (*views, *notes), quiet)


def _require(name: str | None) -> None:
    known = [one.name for one in patterns()]
    if name is not None and name not in known:
        close = nearest(name, known)
        fix = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
        raise InputError([Problem("--pattern", f"there is no pattern {name!r}", fix)])


def _dollars(prices: Prices, kind: str) -> float | None:
    price = prices.of(kind or None)
    return None if price is None else price.dollars


def _screen(
    found: tuple[Told, ...], top: int, period: str, held: float, seen: float
) -> tuple[View, ...]:
    priced = [one for one in found if one.gpu_hours is not None]
    total = sum(one.gpu_hours or 0.0 for one in priced)
    money = sum(one.money or 0.0 for one in priced)
    head = facts(
        {
            "time": period,
            "held": f"{hours(held)} GPU-hours, {seen / held if held else 0:.0%} of them sampled",
            "found": f"{format_some(len(found), 'finding')} of "
            f"{format_some(len({one.name for one in found}), 'pattern')}, "
            f"{hours(total)} GPU-hours" + (f", ${money:,.0f}" if money else ""),
        }
    )
    rows = [
        (
            "" if one.gpu_hours is None else hours(one.gpu_hours),
            "" if one.money is None else f"{one.money:,.0f}",
            one.name, one.owner, one.cases, one.evidence[0] if one.evidence else "",
        )
        for one in found[:top]
    ]  # fmt: skip
    view = table("GPU-hours, $, pattern, owner, cases, the costliest", rows,
                 right="GPU-hours, $, cases", wide="the costliest")  # fmt: skip
    notes: list[View] = []
    if held and seen < SPARSE * held:
        what = "few of these hours are sampled, so that most patterns cannot be looked for"
        notes.append(Note(f"{what}: mw fleet ingest http://PROMETHEUS:9090"))
    if len(found) > top:
        notes.append(Note(f"{len(found) - top} more: --top {len(found)}"))
    if found:
        notes.append(Note(f"what to change: mw fleet patterns --pattern {found[0].name}"))
    elif held:
        notes.append(Note("no pattern is found"))
    return (head, view, *notes) if found else (head, *notes)


def _details(found: tuple[Told, ...], top: int) -> tuple[View, ...]:
    return tuple(_one(one) for one in found[:top]) or (Note("not found in this time"),)


def _one(one: Told) -> Facts:
    money = "" if one.money is None else f", ${one.money:,.0f}"
    return facts(
        {
            "owner": one.owner + (f" ({one.team})" if one.team else ""),
            "cost": "" if one.gpu_hours is None else f"{hours(one.gpu_hours)} GPU-hours{money}",
            "counted": one.cost,
            "evidence": "\n".join(one.evidence),
            "change": one.remedy,
            "jobs": ", ".join(one.jobs[:20]) + (" …" if len(one.jobs) > 20 else ""),
            "nodes": ", ".join(one.nodes[:20]) + (" …" if len(one.nodes) > 20 else ""),
        },
        one.title,
    )


def _write(folder: str, messages: dict[str, str]) -> tuple[str, ...]:
    """Write a letter to each owner; returns the files."""
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
        what = f"letters cannot be written: {error.strerror or error}"
        raise InputError([Problem(folder, what, "name a folder that can be written")]) from None
    return tuple(written)
