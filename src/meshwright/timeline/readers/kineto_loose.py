"""Understands events that have another form than Kineto's, one by one.

Times as strings, numbers for names, lists for arguments, unknown phases: what can be told of an
event is kept, the rest is as if it had not been said.
"""

from typing import Any

from msgspec import Raw

from meshwright.timeline.readers.kineto_events import (
    FAULTS,
    NO_ARGUMENTS,
    QUIET,
    UNREAD,
    Begin,
    Complete,
    Count,
    End,
    Instant,
    decode_loose_event,
)
from meshwright.timeline.readers.kineto_texts import mended
from meshwright.timeline.readers.kineto_times import LARGEST_NS, nanoseconds

NO_TIME = "events without a time were left out"
_KINDS = {
    "X": Complete, "B": Begin, "E": End, "i": Instant, "I": Instant, "C": Count,
    **dict.fromkeys("Msft", QUIET[0]), **{phase: cls for cls, phase in UNREAD.items()},
}  # fmt: skip


def left_out(phase: object) -> str:
    """The note on events of a phase that is not read."""
    return f"events of phase {str(phase)[:20]!r} were left out"


def understood(text: Raw) -> Any:
    """The event in its phase's form, None where nothing is read of it, or a note on its fault.

    The times of a `Complete` are nanoseconds.
    """
    try:
        event = decode_loose_event(text)
    except FAULTS:
        try:
            event = decode_loose_event(mended(bytes(text)))
        except FAULTS:
            return "events that are no objects were left out"
    kind = _KINDS.get(event.ph) if isinstance(event.ph, str) else None
    if kind is None or kind in UNREAD:
        return left_out(event.ph)
    if kind in QUIET:
        return None
    time = nanoseconds(bytes(event.ts))
    if time is None or abs(time) > LARGEST_NS:
        return NO_TIME
    rest: dict[str, Any] = {
        "name": _text(event.name),
        "cat": _text(event.cat),
        "pid": _number_or_text(event.pid),
        "tid": _number_or_text(event.tid),
        "args": event.args if bytes(event.args).startswith(b"{") else NO_ARGUMENTS,
    }
    if kind is not Complete:
        sign, size = (b"-" if time < 0 else b""), abs(time)
        return kind(ts=Raw(b"%b%d.%03d" % (sign, *divmod(size, 1000))), **rest)
    length = nanoseconds(bytes(event.dur)) or 0
    return Complete(ts=time, dur=max(-1, min(length, LARGEST_NS)), **rest)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _number_or_text(value: Any) -> int | str:
    return value if isinstance(value, int) and not isinstance(value, bool) else _text(value)
