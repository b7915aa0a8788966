"""Times of fleet data as text: dates, or days of a trace that has no calendar."""

from datetime import UTC, datetime

_DAY_S = 86_400


_DATED_S = 946_684_800.0
"""The year 2000: what stands before was told in seconds from a beginning that is not told."""


def is_calendar_time(moment_s: float) -> bool:
    """Say whether a moment is a date, or counts from the untold beginning of a trace."""
    return moment_s >= _DATED_S


def format_day(moment_s: float) -> str:
    """Write a moment, without its time where that is midnight."""
    found = datetime.fromtimestamp(moment_s, UTC)
    date = f"{found:%Y-%m-%d}" if is_calendar_time(moment_s) else f"day {moment_s // _DAY_S:.0f}"
    return date if moment_s % _DAY_S == 0 else f"{date} {found:%H:%M}"


def format_clock(moment_s: float) -> str:
    """Name the clock that a moment is told by."""
    return "UTC" if is_calendar_time(moment_s) else "of the trace"


def format_range(since_s: float, until_s: float) -> str:
    """Write from when to when, with the clock that is meant."""
    return f"{format_day(since_s)} to {format_day(until_s)} {format_clock(until_s)}"
