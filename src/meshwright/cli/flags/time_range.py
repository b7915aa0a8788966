"""Stretches of time on the command line: `7d` ago, or a date; and how moments are written there."""

import argparse
import re
import time
from datetime import UTC, datetime

from meshwright.errors import InputError, Problem
from meshwright.spec.units import parse_seconds

_DAY_S = 86_400
_MOST_S = 1e11


def add_times(parser: argparse.ArgumentParser, since: str | None = None) -> None:
    """Add `--since` and `--until`."""
    told = f" (default: {since})" if since else ""
    parser.add_argument(
        "--since", metavar="WHEN", default=since,
        help=f"from then on: 7d (ago), 2026-11-16, 2026-11-16T08:00+01:00{told}",
    )  # fmt: skip
    parser.add_argument("--until", metavar="WHEN", help="up to then (default: now)")


def read_time_range(
    args: argparse.Namespace, now_s: float | None = None
) -> tuple[float | None, float | None]:
    """Return from when to when is asked for, in seconds since 1970."""
    now_s = time.time() if now_s is None else now_s
    since_s, until_s = (
        None if text is None else parse_time(text, flag, now_s)
        for text, flag in ((args.since, "--since"), (args.until, "--until"))
    )
    if since_s is not None and until_s is not None and since_s >= until_s:
        what = f"--since {args.since} is not before --until {args.until}"
        raise InputError([Problem("", what, "swap them")])
    return since_s, until_s


def _require_reachable(moment_s: float, text: str, where: str) -> float:
    """Refuse lengths of time that no data reaches back to."""
    if abs(moment_s) > _MOST_S:
        what = f"{text} ago is before all that could be known"
        raise InputError([Problem(where, what, "write a shorter time, as 30d")])
    return moment_s


def parse_time(text: str, where: str, now_s: float) -> float:
    """Read a moment: how long ago, a date, a date with a time (UTC where no zone is told)."""
    if of_trace := re.fullmatch(r"day (-?\d+)", text):
        return float(of_trace[1]) * _DAY_S
    try:
        if not re.match(r"\d{4}-\d\d", text):
            return _require_reachable(now_s - parse_seconds(text, where), text, where)
        found = datetime.fromisoformat(text)
    except ValueError:
        what = f"{text!r} is no date and no length of time"
        fix = "write 2026-11-16, 2026-11-16T08:00+01:00 or 7d"
        raise InputError([Problem(where, what, fix)]) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
