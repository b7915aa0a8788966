"""`mw fleet top`: who holds which GPUs now, and how busy they are."""

import argparse
from typing import Any

import numpy as np

from meshwright.cli.answer import Answer, Note, facts, table
from meshwright.cli.fleet_account import account_of, add_scope, asked
from meshwright.cli.fleet_figures import group_data
from meshwright.cli.fleet_store import add_store, open_store
from meshwright.cli.fleet_times import clock, day
from meshwright.observe.fleet.account import BUCKETS, Account, hours
from meshwright.observe.fleet.account.attempts import in_states
from meshwright.observe.fleet.account.goodput import KINDS, goodput
from meshwright.observe.fleet.account.places import text
from meshwright.observe.fleet.account.ticks import NEVER, PARTS
from meshwright.spec.units import format_seconds, format_some, parse_count

EXAMPLES = (
    "mw fleet top",
    "mw fleet top --by job --top 20",
    "mw fleet top --by team --redact --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--by", choices=KINDS, default="user", help="who (default: user)")
    parser.add_argument("--top", default="25", metavar="N", help="how many (default: 25)")
    parser.add_argument(
        "--last", dest="since", default="15min", metavar="TIME",
        help="how much time before counts as now (default: 15min)",
    )  # fmt: skip
    parser.add_argument(
        "--at", dest="until", metavar="WHEN",
        help="another moment: 1h (ago), 2026-11-16T08:00 (default: the last that is known)",
    )  # fmt: skip
    add_scope(parser)
    add_store(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with who holds what."""
    top = parse_count(args.top, "--top")
    with open_store(args) as store:
        found = account_of(store, args, asked(store, args))
    return answer(found, args.by, top)


def answer(found: Account, by: str, top: int) -> Answer:
    """Return who holds what, the most first."""
    span_h = found.window.span / 3.6e6
    groups = goodput(found, by, top)
    waiting = _waiting(found)
    buckets = found.buckets()
    free = sum(buckets[bucket.name] for bucket in BUCKETS if not bucket.held)
    now_s = found.window.until / 1e3
    head = {
        "at": f"{day(now_s)} {clock(now_s)}, the mean of {format_seconds(span_h * 3600)}",
        "GPUs": f"{hours(found.capacity) / span_h:,.1f}: {hours(found.held) / span_h:,.1f} held, "
        f"{hours(buckets['idle']) / span_h:,.1f} of them idle; {hours(free) / span_h:,.1f} free or "
        "down",
        "waiting": f"{format_some(round(waiting[1]), 'GPU')} asked for by "
        f"{format_some(waiting[0], 'job')}",
    }
    whose = _whose(found) if by == "job" else {}
    rows = [
        (
            one.name or "(not told)", f"{one.held_hours / span_h:,.1f}",
            *(whose.get(one.name, ("", "")) if whose else (f"{one.attempts:,}",)),
            f"{one.hours['idle'] / span_h:,.1f}",
            "" if one.program is None else f"{100 * one.program:.0f} %",
            f"{one.waited_hours / span_h:,.1f}", _share(one.unknown_hours, one.held_hours),
        )
        for one in groups
    ]  # fmt: skip
    middle = "user, for" if whose else "jobs"
    columns = f"{by}, GPUs, {middle}, idle, tensor or MFU, waits for, not measured"
    right = "GPUs, jobs, for, idle, tensor or MFU, waits for, not measured"
    view = table(columns, rows, right=right)
    data: dict[str, Any] = {
        "at_s": found.window.until / 1e3,
        "seconds": span_h * 3600,
        "gpus": hours(found.capacity) / span_h,
        "held": hours(found.held) / span_h,
        "idle": hours(buckets["idle"]) / span_h,
        "waiting_jobs": waiting[0],
        "waiting_gpus": waiting[1],
        "by": by,
        "holders": [{**group_data(one), "gpus": one.held_hours / span_h} for one in groups],
    }
    notes = () if groups else (Note("nobody holds a GPU or waits for one at that time"),)
    quiet = tuple(f"{one.name}\t{one.held_hours / span_h:.1f}" for one in groups)
    return Answer("fleet-top/1", data, (facts(head), view, *notes), quiet)


def _waiting(found: Account) -> tuple[int, float]:
    """How many jobs wait at the end, and for how many GPUs."""
    jobs = found.attempts
    still = (jobs.waited > found.window.until) | (
        in_states(jobs, "pending") & (jobs.start == NEVER)
    )
    waits = still & (jobs.waits != NEVER) & (jobs.waits < found.window.until) & (jobs.parts > 0)
    return int(waits.sum()), float(np.sum(jobs.parts[waits])) / PARTS


def _whose(found: Account) -> dict[str, tuple[str, str]]:
    """Of each job that holds or waits for anything, its user and for how long it has run."""
    jobs, told = found.attempts, {}
    several = len(jobs.cluster.values) > 1
    held = found.by_attempt.sum(axis=1) > 0
    for at in np.flatnonzero(held | (found.waited > 0)).tolist():
        name = text(jobs.job.values, jobs.job.codes[at])
        if several:
            name = f"{text(jobs.cluster.values, jobs.cluster.codes[at])}/{name}"
        ran_s = (min(int(jobs.end[at]), found.window.until) - int(jobs.start[at])) / 1e3
        if held[at] or name not in told:
            ran = format_seconds(ran_s) if held[at] else ""
            told[name] = text(jobs.user.values, jobs.user.codes[at]), ran
    return told


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""
