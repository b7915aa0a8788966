"""Stretches of time on the command line: `7d` ago, or a date; and how moments are written there."""

import argparse
import re
import time
from datetime import UTC, datetime

from meshwright.errors import InputError, Problem
from meshwright.spec.units import parse_seconds

_DATED_S = 946_684_800.0
"""The year 2000: what stands before was told in seconds from a beginning that is not told."""
_DAY_S = 86_400


def add_times(parser: argparse.ArgumentParser, since: str | None = None) -> None:
    """Add `--since` and `--until`."""
    told = f" (default: {since})" if since else ""
    parser.add_argument(
        "--since", metavar="WHEN", default=since,
        help=f"from then on: 7d (ago), 2026-11-16, 2026-11-16T08:00+01:00{told}",
    )  # fmt: skip
    parser.add_argument("--until", metavar="WHEN", help="up to then (default: now)")


def times(
    args: argparse.Namespace, now_s: float | None = None
) -> tuple[float | None, float | None]:
    """Return from when to when is asked for, in seconds since 1970."""
    now_s = time.time() if now_s is None else now_s
    since_s, until_s = (
        None if text is None else moment(text, flag, now_s)
        for text, flag in ((args.since, "--since"), (args.until, "--until"))
    )
    if since_s is not None and until_s is not None and since_s >= until_s:
        what = f"--since {args.since} is not before --until {args.until}"
        raise InputError([Problem("", what, "swap them")])
    return since_s, until_s


def moment(text: str, where: str, now_s: float) -> float:
    """Read a moment: how long ago, a date, a date with a time (UTC where no zone is told)."""
    if of_trace := re.fullmatch(r"day (-?\d+)", text):
        return float(of_trace[1]) * _DAY_S
    try:
        if not re.match(r"\d{4}-\d\d", text):
            return now_s - parse_seconds(text, where)
        found = datetime.fromisoformat(text)
    except ValueError:
        what = f"{text!r} is no date and no length of time"
        fix = "write 2026-11-16, 2026-11-16T08:00+01:00 or 7d"
        raise InputError([Problem(where, what, fix)]) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def is_dated(moment_s: float) -> bool:
    """Say whether a moment is a date, or counts from the untold beginning of a trace."""
    return moment_s >= _DATED_S


def day(moment_s: float) -> str:
    """Write a moment, without its time where that is midnight."""
    found = datetime.fromtimestamp(moment_s, UTC)
    date = f"{found:%Y-%m-%d}" if is_dated(moment_s) else f"day {moment_s // _DAY_S:.0f}"
    return date if moment_s % _DAY_S == 0 else f"{date} {found:%H:%M}"


def clock(moment_s: float) -> str:
    """Name the clock that a moment is told by."""
    return "UTC" if is_dated(moment_s) else "of the trace"


def stretch(since_s: float, until_s: float) -> str:
    """Write from when to when, with the clock that is meant."""
    return f"{day(since_s)} to {day(until_s)} {clock(until_s)}"
