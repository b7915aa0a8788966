"""Understands events that have another form than Kineto's, one by one.

Times as strings, numbers for names, lists for arguments, unknown phases: what can be told of an
event is kept, the rest is as if it had not been said.
"""

from typing import Any

from msgspec import Raw

from meshwright.timeline.readers.chrome_trace.event_types import (
    DECODE_ERRORS,
    IGNORED_EVENT_TYPES,
    NO_ARGUMENTS,
    UNSUPPORTED_EVENT_TYPES,
    BeginEvent,
    CompleteEvent,
    CounterEvent,
    EndEvent,
    InstantEvent,
    decode_any_event,
)
from meshwright.timeline.readers.parsing.json_args import repair_json
from meshwright.timeline.readers.parsing.timestamps import MAX_TIMESTAMP_NS, parse_ns

NO_TIMESTAMP_NOTE = "events without a time were left out"
_KINDS = {
    "X": CompleteEvent, "B": BeginEvent, "E": EndEvent, "i": InstantEvent, "I": InstantEvent,
    "C": CounterEvent,
    **dict.fromkeys("Msft", IGNORED_EVENT_TYPES[0]), **{phase: cls for cls,
    phase in UNSUPPORTED_EVENT_TYPES.items()},
}  # fmt: skip


def describe_unsupported_phase(phase: object) -> str:
    """The note on events of a phase that is not read."""
    return f"events of phase {str(phase)[:20]!r} were left out"


def parse_any_event(text: Raw) -> Any:
    """The event in its phase's form, None where nothing is read of it, or a note on its fault.

    The times of a `CompleteEvent` are nanoseconds.
    """
    try:
        event = decode_any_event(text)
    except DECODE_ERRORS:
        try:
            event = decode_any_event(repair_json(bytes(text)))
        except DECODE_ERRORS:
            return "events that are no objects were left out"
    kind = _KINDS.get(event.ph) if isinstance(event.ph, str) else None
    if kind is None or kind in UNSUPPORTED_EVENT_TYPES:
        return describe_unsupported_phase(event.ph)
    if kind in IGNORED_EVENT_TYPES:
        return None
    time = parse_ns(bytes(event.ts))
    if time is None or abs(time) > MAX_TIMESTAMP_NS:
        return NO_TIMESTAMP_NOTE
    rest: dict[str, Any] = {
        "name": _text(event.name),
        "cat": _text(event.cat),
        "pid": _number_or_text(event.pid),
        "tid": _number_or_text(event.tid),
        "args": event.args if bytes(event.args).startswith(b"{") else NO_ARGUMENTS,
    }
    if kind is not CompleteEvent:
        sign, size = (b"-" if time < 0 else b""), abs(time)
        return kind(ts=Raw(b"%b%d.%03d" % (sign, *divmod(size, 1000))), **rest)
    length = parse_ns(bytes(event.dur)) or 0
    return CompleteEvent(ts=time, dur=max(-1, min(length, MAX_TIMESTAMP_NS)), **rest)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _number_or_text(value: Any) -> int | str:
    return value if isinstance(value, int) and not isinstance(value, bool) else _text(value)
