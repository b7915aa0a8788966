"""`Endpoint`: from the bytes of a request to the bytes of its answer.

And everything that can come between: keys, sizes, times, clients that leave, the server's end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Literal, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshwright.run.serve.server.desk import Answer, Desk
from meshwright.run.serve.server.faults import Fault, unreadable
from meshwright.run.serve.server.keys import Keys
from meshwright.run.serve.server.nulls import without_nulls
from meshwright.run.serve.server.spans import Span, tell_fault
from meshwright.run.serve.server.streams import send_events
from meshwright.run.serve.server.traffic import Call

Body = TypeVar("Body", bound=msgspec.Struct)
Guard = Literal["key", "admin"]


class Endpoint(Generic[Body]):
    """Answers requests of one kind."""

    def __init__(
        self,
        desk: Desk,
        body: type[Body],
        handle: Callable[[Desk, Body, Call], Awaitable[Answer]],
        guard: Guard = "key",
    ) -> None:
        self._desk = desk
        self._body, self._decoder = body, msgspec.json.Decoder(body)
        self._empty = guard == "admin"
        self._handle = handle
        self._guard: Guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        task = asyncio.current_task()
        assert task is not None
        desk = self._desk
        headers = Headers(scope=scope)
        call = Call(scope["meshwright.name"], "", task)
        scope["meshwright.call"] = call
        limit_s = desk.settings.request_s
        timer = asyncio.get_running_loop().call_later(limit_s, call.end, _too_long(limit_s))
        desk.traffic.calls.add(call)
        watch: asyncio.Task[None] | None = None
        span = desk.spans.begin(headers) if desk.spans is not None else None
        try:
            call.tenant = admitted(desk, headers, self._guard)
            data = await _read(headers, receive, desk)
            watch = asyncio.create_task(_watch(receive, call))
            answer = await self._handle(desk, self._decoded(data), call)
            if isinstance(answer, bytes):
                response = Response(answer, media_type="application/json")
                await response(scope, receive, send)
            else:
                # The first events come before the status, so that a fault still has its own.
                first = await answer.some()
                await send_events(
                    first,
                    answer,
                    call,
                    begin=send,
                    send=scope["meshwright.send"],
                    pause_s=desk.settings.stream_pause_s,
                )
        except Fault as fault:
            call.fault = fault
            await fault.response()(scope, receive, send)
        except asyncio.CancelledError:
            call.fault = why = call.why()
            if why is None:
                raise
            if not call.gone:
                await why.response()(scope, receive, send)
        except Exception:
            call.fault = Fault(500, "The server failed")
            raise
        finally:
            timer.cancel()
            if watch is not None:
                watch.cancel()
            desk.traffic.calls.discard(call)
            await self._let_go(call, span, scope["path"])

    async def _let_go(self, call: Call, span: Span | None, path: str) -> None:
        """Close what a request holds, and say on its span what it was."""
        for held in call.open:
            await held.close()
            if span is not None:
                held.tell(span)
        if span is not None:
            span.set_attribute("gen_ai.request.id", call.name)
            span.set_attribute("gen_ai.response.model", self._desk.settings.model)
            span.set_attribute("url.path", path)
            if call.fault is not None:
                tell_fault(span, call.fault)
            span.end()

    def _decoded(self, data: bytes) -> Body:
        data = data or b"{}" if self._empty else data
        try:
            try:
                return self._decoder.decode(data)
            except msgspec.ValidationError as error:
                if "unknown field" not in str(error):
                    raise
                return self._decoder.decode(without_nulls(data, self._body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise unreadable(error) from None
        except RecursionError:
            raise Fault(400, "The body is nested too deeply", code="invalid_json") from None


def admitted(desk: Desk, headers: Headers, guard: Guard) -> str:
    """Return whose request it is; empty where the server has no keys."""
    given = headers.get("authorization", "")
    if guard == "admin":
        origin, known = headers.get("origin"), desk.settings.origins
        if origin is not None and origin not in known and "*" not in known:
            # A page can send an empty body anywhere without asking first.
            raise Fault(403, f"Pages of {origin} may change no engine", code="admin_only")
        if len(desk.admin_keys):
            if desk.admin_keys.holder(given) is None and desk.keys.holder(given) is not None:
                raise Fault(403, "This key may ask, but change no engine", code="admin_only")
            return _holder(desk.admin_keys, given, "an admin key")
        if not desk.settings.admin:
            raise Fault(
                403,
                "This changes the engine, which nobody may here: start the server with admin keys"
                " (MESHWRIGHT_ADMIN_KEYS) or with `--admin`",
                code="admin_only",
            )
    if not len(desk.keys):
        return ""
    return _holder(desk.keys, given, "an API key")


def _holder(keys: Keys, given: str, what: str) -> str:
    holder = keys.holder(given)
    if holder is None:
        wrong = "The key is not known" if given else f"This needs {what}"
        raise Fault(401, f"{wrong}: send `Authorization: Bearer KEY`", code="invalid_api_key")
    return holder


async def _read(headers: Headers, receive: Receive, desk: Desk) -> bytes:
    """Return the body, which must be JSON, not too large, and come in time."""
    most = desk.settings.body_bytes
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(desk.settings.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Fault(400, "The body broke off", code="incomplete_body")
                part = message.get("body", b"")
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        limit_s = desk.settings.body_s
        raise Fault(408, f"The body took longer than {limit_s:g} s", code="slow_body") from None
    # Pages of a browser can send other types to any address without asking first.
    if size and kind != "application/json":
        raise Fault(
            415,
            f"The body's type is {kind or 'not told'!r}: send `Content-Type: application/json`",
            code="wrong_content_type",
        )
    return b"".join(parts)


async def _watch(receive: Receive, call: Call) -> None:
    """Break a call off when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.leave()


def _too_large(most: int) -> Fault:
    return Fault(413, f"The body is larger than {most} bytes", code="body_too_large")


def _too_long(limit_s: float) -> Fault:
    return Fault(504, f"The request took longer than {limit_s:g} s", code="timeout")
