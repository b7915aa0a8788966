"""Cuts the text of a trace into pieces of whole events, so that memory holds one piece at a time.

    {"schemaVersion": 1, "traceEvents": [ {...}, {...}, ... ], "traceName": "..."}
     head                                 pieces                tail

A piece ends at the last place in the buffer that looks as the first two events were parted. That
it is one is not assumed but seen: text cut anywhere else, within a string or an object, is no
list of events once it is closed, and the decoder refuses it. Then other places are tried, and
at last every bracket is counted. Knows JSON; what an event means is not its business.
"""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from meshwright.timeline.readers.chrome_trace.event_types import DECODE_ERRORS

EventHandler = Callable[[Any], None]
"""Takes the text of a list of events; raises one of `DECODE_ERRORS` where it is none."""
BUFFER_BYTES = 1 << 20
_LARGEST_HEAD = 1 << 26
_MOST_OPENINGS = 16
_LARGEST_EVENT = 1 << 25
_DEEPEST = 10_000
_NAME = b'"traceEvents"'
_OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]|"', re.DOTALL)
_PARTING = re.compile(rb"\}(\s*,\s*)\{")
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_TRIES = 8


class NotATrace(Exception):
    """The text has no list of trace events."""


class TruncatedTrace(NotATrace):
    """The text is the start of a profiler's trace and ends before its events."""


class TraceHeader(NamedTuple):
    """What a trace says beside its events."""

    fields: dict[str, Raw]
    error: str
    """What is wrong with the text; empty where nothing is."""


def read_event_chunks(chunks: Iterator[bytes], take: EventHandler) -> TraceHeader:
    """Hand all events of a trace to `take`, piece by piece, and return what else it says."""
    fields, bare, text = _head(chunks)
    buffer = _Buffer(text, chunks)
    del text
    tail, fault = _events(buffer, take)
    if bare:
        return TraceHeader(fields, "" if fault == _CUT_SHORT and not buffer.inside else fault)
    if fault:
        return TraceHeader(fields, fault)
    more, fault = _tail(tail)
    again = more.pop(_NAME[1:-1].decode(), None)
    if again is not None and not fault:
        fault = _take_again(again, take)
    return TraceHeader({**fields, **more}, fault)


_CUT_SHORT = "breaks off before its end"


class _Buffer:
    """The text that was read and not yet taken, with one byte of room before it."""

    def __init__(self, text: bytes, chunks: Iterator[bytes]) -> None:
        self.data = bytearray(b"[") + text
        self.chunks = chunks
        self.inside = False
        """Whether an event was begun and not ended when the text stopped."""

    def fill(self, least: int) -> bool:
        """Read on, until there are so many bytes; False at the end."""
        for chunk in self.chunks:
            self.data += chunk
            if len(self.data) >= least:
                return True
        return False

    def drop(self, end: int) -> None:
        """Forget the text before this place; the byte before it becomes the room."""
        del self.data[: end - 1]
        self.data[0] = 0x5B  # "["


def _head(chunks: Iterator[bytes]) -> tuple[dict[str, Raw], bool, bytes]:
    """What stands before the events, whether the file is a bare list, and the text after it."""
    text, after, tries = bytearray(), 0, 0
    for chunk in chunks:
        text += chunk
        if not after:
            text = text.removeprefix(b"\xef\xbb\xbf").lstrip()
        if text.startswith(b"["):
            return {}, True, bytes(text[1:])
        if text and not text.startswith(b"{"):
            raise NotATrace("is no JSON")
        for match in _OPENING.finditer(text, after):
            after, tries = match.end(), tries + 1
            if tries > _MOST_OPENINGS:  # each is tried with all that stands before it
                raise NotATrace("names traceEvents over and over before there are any")
            try:
                fields = _FIELDS.decode(text[: match.start()] + b'"traceEvents":[]}')
            except DECODE_ERRORS:
                continue
            return fields, False, bytes(text[match.end() :])
        # What was looked through needs no second look, but for a name that is cut in two.
        begun = text.rfind(_NAME, after)
        after = begun if begun >= 0 else max(after, len(text) - len(_NAME))
        if len(text) > _LARGEST_HEAD:
            raise NotATrace(f"has no traceEvents in its first {_LARGEST_HEAD >> 20} MiB")
    try:
        found = list(_FIELDS.decode(text))
    except DECODE_ERRORS:
        if text.startswith(b"{") and b'"deviceProperties"' in text:
            raise TruncatedTrace("breaks off before its events") from None
        raise NotATrace("is empty" if not text.strip() else "is no complete JSON object") from None
    if "traceEvents" in found:
        raise NotATrace("has traceEvents that are no list")
    keys = ", ".join(found[:6])
    raise NotATrace(f"is JSON without traceEvents; it has {keys or 'nothing'}")


def _events(buffer: _Buffer, take: EventHandler) -> tuple[bytes, str]:
    """Take events until their list ends; the text after it, and what is wrong."""
    parting = b""
    wanted = seen = 0
    while buffer.fill(wanted):
        if seen and not any(buffer.data.find(end, seen) >= 0 for end in (b"}", b"]")):
            wanted, seen = 2 * len(buffer.data), len(buffer.data)  # nothing can have ended
            if seen > _LARGEST_EVENT:
                break
            continue
        parting = parting or _parting(buffer.data)
        if parting and _take_whole(buffer, parting, take):
            wanted = seen = 0
            continue
        done = _take_counted(buffer, take)
        if done is not None:
            return done
        # An event may be larger than the buffer: look again when there is twice as much.
        wanted, seen = 2 * len(buffer.data), len(buffer.data)
        if seen > _LARGEST_EVENT:
            break
    if len(buffer.data) > _LARGEST_EVENT:
        return b"", f"has an event of more than {_LARGEST_EVENT >> 20} MiB"
    if parting:
        _take_whole(buffer, parting, take)
    done = _take_counted(buffer, take)
    if done is not None:
        return done
    buffer.inside = bool(bytes(buffer.data[1:]).strip(b" \t\r\n,"))
    return b"", _CUT_SHORT


def _parting(data: bytearray) -> bytes:
    """How the first two events are parted: what ends one, is between them, and opens the next."""
    ends = _ends(data, most=1).ends
    match = _PARTING.match(data, ends[0] - 1) if ends else None
    return match[0] if match else b""


def _take_whole(buffer: _Buffer, parting: bytes, take: EventHandler) -> bool:
    """Take what lies before the last parting, if it can be found."""
    data = buffer.data
    end = len(data)
    for _ in range(_TRIES):
        end = data.rfind(parting, 1, end)
        if end < 0:
            break
        after = data[end + 1]
        data[end + 1] = 0x5D  # "]": the parting has a comma, so there is room
        try:
            with memoryview(data) as view:
                take(view[: end + 2])
        except DECODE_ERRORS:
            data[end + 1] = after
            continue
        buffer.drop(end + len(parting) - 1)
        return True
    return False


class _Counted(NamedTuple):
    ends: list[int]
    """Where each complete event ends."""
    closed: int
    """Where the list ends, or -1."""


def _ends(data: bytearray, most: int | None = None) -> _Counted:
    """Count brackets from the start of an event; stop after so many events."""
    depth = 0
    ends: list[int] = []
    for token in _TOKEN.finditer(data, 1):
        first = data[token.start()]
        if first in b"{[":
            depth += 1
            if depth > _DEEPEST:
                break  # No decoder goes so deep: it is no event.
        elif first in b"}]":
            if not depth:
                return _Counted(ends, token.start())
            depth -= 1
            if not depth:
                ends.append(token.end())
                if len(ends) == most:
                    break
        elif token.end() - token.start() == 1:
            break  # A string without end.
    return _Counted(ends, -1)


def _take_counted(buffer: _Buffer, take: EventHandler) -> tuple[bytes, str] | None:
    """Take all complete events; the text after the list where it ends here, and what is wrong."""
    data = buffer.data
    ends, closed = _ends(data)
    end = ends[-1] if ends else 1
    try:
        take(bytes(data[:end]) + b"]")
    except DECODE_ERRORS:
        fault = _take_singly(bytes(data), ends, take)
        if fault:
            return b"", fault
    if closed >= 0:
        between = data[end:closed].strip(b" \t\r\n,")
        tail = data[closed + 1 :]
        for chunk in buffer.chunks:
            tail += chunk
            if len(tail) > _LARGEST_HEAD:
                return b"", f"has more than {_LARGEST_HEAD >> 20} MiB behind its events"
        return bytes(tail), _odd(between)
    if ends:
        rest = data[end:].lstrip(b" \t\r\n,")
        if rest and not rest.startswith(b"{"):
            return b"", _odd(rest)
        buffer.data = bytearray(b"[") + rest
    return None


def _odd(text: bytes | bytearray) -> str:
    shown = bytes(text[:40]).decode(errors="replace")
    return f"has {shown!r} where an event should be" if text else ""


def _take_singly(data: bytes, ends: list[int], take: EventHandler) -> str:
    """Take one event after another up to the first that is none; say what is wrong with it.

    Some tools part events by new lines alone: then all are events, and nothing is wrong.
    """
    events = [data[a:b].lstrip(b" \t\r\n,") for a, b in pairwise([1, *ends])]
    try:
        take(b"[%b]" % b",".join(events))
    except DECODE_ERRORS:
        pass
    else:
        return ""
    for event in events:
        try:
            take(b"[%b]" % event)
        except DECODE_ERRORS as error:
            return f"has a broken event, {event[:60].decode(errors='replace')!r}: {error}"
    return ""


def _take_again(text: Raw, take: EventHandler) -> str:
    """Take a second list of events, as files have that were joined; say what is wrong with it."""
    try:
        take(text)
    except DECODE_ERRORS as error:
        return f"has a second, broken list of events: {error}"
    return ""


def _tail(text: bytes) -> tuple[dict[str, Raw], str]:
    text = text.strip()
    try:
        return _FIELDS.decode(b"{" + text.removeprefix(b",")), ""
    except DECODE_ERRORS as error:
        return {}, f"breaks off after its events: {error}" if text else _CUT_SHORT
