"""Lines of kernel logs, whoever wrote them: when, on which node, and what the kernel said."""

import json
import re
from datetime import UTC, datetime, tzinfo
from typing import Final, NamedTuple

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov",
                   "Dec")  # fmt: skip
_ISO = r"(?P<iso>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d(?:\.\d+)?)"
_HOST = r"(?P<node>[\w.:-]+) (?:kernel|nvidia-fabricmanager\S*|nv-fabricmanager\S*)(?:\[\d+\])?: "
_BOOTED = r"(?:\[ *(?P<up>\d+\.\d+)\](?:\[ *[TC]\d+\])? ?)"
_FORMS: Final = tuple(
    re.compile(form)
    for form in (
        # journalctl -o short-iso, rsyslog with precise times; the second is dmesg's own
        rf"(?:<\d+>)?(?:\d )?{_ISO} {_HOST}{_BOOTED}?(?P<text>.*)",
        rf"(?:\w+ *:\w+ *: )?\[?{_ISO}\]? (?P<text>.*)",
        # journalctl, syslog: no year
        rf"(?:<\d+>)?(?P<month>[A-Z][a-z]{{2}}) +(?P<day>\d+) {_CLOCK} {_HOST}{_BOOTED}?"
        r"(?P<text>.*)",
        # dmesg -T, fabric manager
        rf"(?:\w+ *:\w+ *: )?\[[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) +(?P<day>\d+) {_CLOCK} "
        r"(?P<year>\d{4})\] (?P<text>.*)",
        rf"\[(?P<month>[A-Z][a-z]{{2}}) +(?P<day>\d+) (?P<year>\d{{4}}) {_CLOCK}\] "
        r"(?P<text>\[[A-Z]+\] \[tid \d+\] .*)",
        # dmesg, and /dev/kmsg: seconds and microseconds since the node started
        rf"(?:<\d+>|\w+ *:\w+ *: )?{_BOOTED}(?P<text>.*)",
        r"\d+,\d+,(?P<micros>\d+),[^;]*;(?P<text>.*)",
    )
)


class LogLine(NamedTuple):
    """What the kernel said at a moment."""

    time_s: float | None
    """None: only how long after the start is told, and nobody told when that was."""
    node: str
    """Empty where the log does not say."""
    text: str


class LogClock(NamedTuple):
    """What a log leaves out of its times."""

    zone: tzinfo = UTC
    """Where times were printed that name no zone."""
    written_s: float = 0.0
    """When the log was last written to: lines without a year are not later."""
    boot_s: float | None = None
    """When the node started."""


def parse_line(line: str, clock: LogClock) -> LogLine | None:
    """Take a line apart; None: it is of no form that is known."""
    if line.startswith("{"):
        return _journal(line)
    for form in _FORMS:
        found = form.match(line)
        if found:
            known = {name: value or "" for name, value in found.groupdict().items()}
            try:
                return LogLine(_time(known, clock), known.get("node", ""), known["text"])
            except ValueError:
                return None
    return None


def _journal(line: str) -> LogLine | None:
    """Read a line of `journalctl -o json`."""
    try:
        entry = json.loads(line)
        stamp = entry.get("_SOURCE_REALTIME_TIMESTAMP") or entry["__REALTIME_TIMESTAMP"]
        text = entry["MESSAGE"]
        if isinstance(text, list):  # what is no plain text comes as bytes
            text = bytes(text).decode("utf-8", "replace")
        return LogLine(int(stamp) / 1e6, str(entry.get("_HOSTNAME", "")), str(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _time(known: dict[str, str], clock: LogClock) -> float | None:
    if known.get("iso"):
        found = datetime.fromisoformat(known["iso"].replace(",", "."))
        return (found if found.tzinfo else found.replace(tzinfo=clock.zone)).timestamp()
    if known.get("month"):
        return _dated(known, clock)
    since_boot = float(known["micros"]) / 1e6 if known.get("micros") else float(known["up"])
    return None if clock.boot_s is None else clock.boot_s + since_boot


def _dated(known: dict[str, str], clock: LogClock) -> float:
    month, day = _MONTHS.index(known["month"]) + 1, int(known["day"])
    hour, minute, second = known["clock"].split(":")

    def of(year: int) -> float:
        whole = datetime(year, month, day, int(hour), int(minute), tzinfo=clock.zone)
        return whole.timestamp() + float(second)

    if known.get("year"):
        return of(int(known["year"]))
    year = datetime.fromtimestamp(clock.written_s, clock.zone).year
    # The 29th of February is in none of most years.
    for candidate in range(year, year - 8, -1):
        try:
            time_s = of(candidate)
        except ValueError:
            continue
        if time_s <= clock.written_s + 86_400:
            return time_s
    raise ValueError(f"no year fits {known['month']} {day}")
