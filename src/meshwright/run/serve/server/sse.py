"""Server-sent events: one write for whatever one step of the engine brought."""

import asyncio
import logging
from typing import Literal, Protocol

import msgspec
from starlette.types import Send

from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.protocol.response_schema import UsageInfo

LOG = logging.getLogger("meshwright.server")
SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that gather answers before they pass them on would undo the streaming.
    (b"x-accel-buffering", b"no"),
)
DONE_EVENT = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()
encode = _encoder.encode


UsageReporting = Literal["never", "last", "always"]
"""When the counts of tokens are told: never, at the end, or with every event."""


class TokenCounter(Protocol):
    """Counts the tokens of a stream's events so far."""

    def __call__(self, unsent: int = 0) -> UsageInfo:
        """Return the counts without so many tokens of the last piece, which are yet to be sent."""


class EventSource(Protocol):
    """Something that is written out as it comes."""

    async def next_events(self) -> bytes:
        """Return whole events; nothing where there are no more."""


def encode_event(value: object) -> bytes:
    """Return a value as one event."""
    return b"data: %b\n\n" % encode(value)


class ChunkTemplate:
    """The bytes around the choices of a stream's events, which are the same in all of them."""

    def __init__(
        self, name: str, kind: str, created: int, model: str, tell_usage: UsageReporting
    ) -> None:
        head = encode({"id": name, "object": kind, "created": created, "model": model})
        self._head = b"data: %b" % head[:-1]
        self._usage = tell_usage
        self._tail = b"}\n\n" if tell_usage == "never" else b',"usage":null}\n\n'
        self.has_constant_usage = tell_usage != "always"
        """Whether all events but the last end alike."""

    def split_at_text(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Return what stands before and after a text that alone changes from event to event."""
        return b'%b,"choices":[%b' % (self._head, before), b"%b]%b" % (after, self._tail)

    def encode_chunk(self, choices: bytes, usage: TokenCounter, unsent: int = 0) -> bytes:
        """Return an event with one or more choices, which are JSON already."""
        tail = self._tail
        if self._usage == "always":
            tail = b',"usage":%b}\n\n' % encode(usage(unsent))
        return b'%b,"choices":[%b]%b' % (self._head, choices, tail)

    def final_events(self, usage: UsageInfo) -> bytes:
        """Return what ends a stream."""
        if self._usage == "never":
            return DONE_EVENT
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, encode(usage)) + DONE_EVENT


async def send_events(
    first: bytes,
    lines: EventSource,
    context: RequestContext,
    *,
    begin: Send,
    send: Send,
    pause_s: float,
) -> None:
    """Send an answer as it comes; what goes wrong is said in it, for its status is out already.

    Args:
        first: The events that are there.
        lines: Those to come.
        context: The request.
        begin: Sends the status and the headers, which others on the way want to see.
        send: Sends all else, which nobody on the way looks at.
        pause_s: Seconds between two writes; what comes meanwhile is written together.
    """
    fault: ApiError | None = None
    try:
        await begin({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        data = first
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if pause_s:
                await asyncio.sleep(pause_s)
            data = await lines.next_events()
    except ApiError as raised:
        fault = raised
    except asyncio.CancelledError:
        if (fault := context.take_abort_reason()) is None:
            raise
    except Exception:
        LOG.exception("request %s failed", context.request_id)
        fault = ApiError(500, "The server failed; its log says why")
    context.error = fault
    if not context.is_disconnected:
        last = b"" if fault is None else b"data: %b\n\n" % fault.to_json() + DONE_EVENT
        await send({"type": "http.response.body", "body": last, "more_body": False})
