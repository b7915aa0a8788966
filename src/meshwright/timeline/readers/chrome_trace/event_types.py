"""What a trace event looks like, for the decoder: one class per phase, few fields each.

Measured on a trace of 852 MB: telling phases apart by their tag, leaving `args` undecoded and
keeping the classes out of the garbage collector decodes 600 MB per CPU second, three quarters
more than one class for all phases. What a field means to a timeline is not known here.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

NO_ARGUMENTS = Raw(b"{}")
DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)
"""What decoding raises: malformed text, wrong types, too deep, no UTF-8, endless digits."""
Number = int | float
Name = int | str


class CompleteEvent(Struct, gc=False, tag="X", tag_field="ph"):
    """A span with its length."""

    ts: Number
    name: str = ""
    cat: str = ""
    dur: Number = 0
    pid: Name = 0
    tid: Name = 0
    args: Raw = NO_ARGUMENTS


class ExactCompleteEvent(Struct, gc=False, tag="X", tag_field="ph"):
    """A span whose start has more digits than a float holds."""

    ts: Raw
    name: str = ""
    cat: str = ""
    dur: Number = 0
    pid: Name = 0
    tid: Name = 0
    args: Raw = NO_ARGUMENTS


class OtherEvent(Struct, gc=False):
    """What all other events have that are read."""

    ts: Raw
    name: str = ""
    cat: str = ""
    pid: Name = 0
    tid: Name = 0
    args: Raw = NO_ARGUMENTS


class BeginEvent(OtherEvent, gc=False, tag="B", tag_field="ph"):
    """The start of a span."""


class EndEvent(OtherEvent, gc=False, tag="E", tag_field="ph"):
    """The end of the span that began last on its thread."""


class InstantEvent(OtherEvent, gc=False, tag="i", tag_field="ph"):
    """A moment."""


class LegacyInstantEvent(OtherEvent, gc=False, tag="I", tag_field="ph"):
    """A moment, as it was written once."""


class CounterEvent(OtherEvent, gc=False, tag="C", tag_field="ph"):
    """Values from then on."""


def _unread(phase: str) -> Any:
    return msgspec.defstruct(f"Unread{ord(phase)}", [], gc=False, tag=phase, tag_field="ph")


IGNORED_EVENT_TYPES = tuple(_unread(phase) for phase in "Msft")
"""Names and flows: the spans' own numbers say what they would add."""
UNSUPPORTED_EVENT_TYPES = {cls: phase for phase in "benNODPRcvVa()," for cls in (_unread(phase),)}
"""Phases that no timeline has room for; their number is noted."""
_OTHERS: Any = BeginEvent | EndEvent | InstantEvent | LegacyInstantEvent | CounterEvent
for _cls in (*IGNORED_EVENT_TYPES, *UNSUPPORTED_EVENT_TYPES):
    _OTHERS = _OTHERS | _cls

decode_events = msgspec.json.Decoder(list[CompleteEvent | _OTHERS]).decode
decode_exact_events = msgspec.json.Decoder(list[ExactCompleteEvent | _OTHERS]).decode


class AnyEvent(Struct):
    """Any event at all, for those the classes above refuse."""

    ph: Any = ""
    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"0")
    name: Any = ""
    cat: Any = ""
    pid: Any = 0
    tid: Any = 0
    args: Raw = NO_ARGUMENTS


decode_raw_events = msgspec.json.Decoder(list[Raw]).decode
decode_any_event = msgspec.json.Decoder(AnyEvent).decode


class DeviceArguments(Struct, gc=False):
    """What is read of the arguments of work on a device, and of collectives."""

    device: Name | None = None
    stream: Name | None = None
    correlation: int = -1
    num_bytes: int = msgspec.field(default=-1, name="bytes")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements_in: int = msgspec.field(default=-1, name="In msg nelems")
    elements_out: int = msgspec.field(default=-1, name="Out msg nelems")
    dtype: str | None = None
    group: str | None = msgspec.field(default=None, name="Process Group Name")


class LaunchArguments(Struct, gc=False):
    """What is read of the arguments of a call that launches."""

    correlation: int = -1


class MemoryArguments(Struct, gc=False):
    """What a `[memory]` instant says."""

    device_type: int = msgspec.field(default=0, name="Device Type")
    device: int = msgspec.field(default=-1, name="Device Id")
    change_bytes: int = msgspec.field(default=0, name="Bytes")
    allocated_bytes: int = msgspec.field(default=-1, name="Total Allocated")
    reserved_bytes: int = msgspec.field(default=-1, name="Total Reserved")


def decode_arguments(kind: type[Struct], texts: list[Raw]) -> list[Any]:
    """Decode arguments one after another in one call; those of a wrong form say nothing.

    One call for a thousand of them takes a third of the time of a thousand calls.
    """
    try:
        return _lists(kind)(b"[%b]" % b",".join(texts))  # type: ignore[no-any-return]
    except DECODE_ERRORS:
        return [_mended(kind, text) for text in texts]


_DECODERS: dict[type[Struct], Any] = {}


def _lists(kind: type[Struct]) -> Any:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
    return _DECODERS[kind]


def _mended(kind: type[Struct], text: Raw) -> Any:
    """The fields that have the right form, the others as if they were missing."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except DECODE_ERRORS:
        return kind()
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.encode_name in given:
            value = given[field.encode_name]
            try:
                values[field.name] = msgspec.convert(value, field.type, strict=False)
            except DECODE_ERRORS:
                continue
    return kind(**values)
