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

from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.api_keys import ApiKeys
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.request_decoder import decode_body
from meshwright.run.serve.server.sse import send_events
from meshwright.run.serve.server.tracing import TraceSpan, record_error

MAX_ADMIN_BODY_BYTES = 2**16
"""Bodies of administrative requests are decoded in the event loop."""
BodyT = TypeVar("BodyT")
StructT = TypeVar("StructT", bound=msgspec.Struct)
BodyReader = Callable[[bytes], Awaitable[BodyT]]
"""Makes the value that a handler takes of the bytes of a body."""
RequiredKey = Literal["key", "admin"]


class Endpoint(Generic[BodyT]):
    """Answers requests of one kind."""

    def __init__(
        self,
        app_state: AppState,
        read_body: BodyReader[BodyT],
        handle: Callable[[AppState, BodyT, RequestContext], Awaitable[ResponseBody]],
        guard: RequiredKey = "key",
    ) -> None:
        self._desk = app_state
        self._read_body = read_body
        self._handle = handle
        self._guard: RequiredKey = guard
        self._max_body_bytes = app_state.config.max_body_bytes
        if guard == "admin":
            self._max_body_bytes = min(self._max_body_bytes, MAX_ADMIN_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        task = asyncio.current_task()
        assert task is not None
        desk = self._desk
        headers = Headers(scope=scope)
        call = RequestContext(scope["meshwright.name"], "", task)
        scope["meshwright.call"] = call
        limit_s = desk.config.request_timeout_s
        timer = asyncio.get_running_loop().call_later(limit_s, call.abort, _too_long(limit_s))
        desk.admission.requests.add(call)
        watch: asyncio.Task[None] | None = None
        span = desk.tracer.start_span(headers) if desk.tracer is not None else None
        try:
            call.tenant = authenticate(desk, headers, self._guard)
            data = await _read(headers, receive, self._max_body_bytes, desk.config.body_timeout_s)
            watch = asyncio.create_task(_watch(receive, call))
            answer = await self._handle(desk, await self._read_body(data), call)
            if isinstance(answer, bytes):
                response = Response(answer, media_type="application/json")
                await response(scope, receive, send)
            else:
                # The first events come before the status, so that a fault still has its own.
                first = await answer.next_events()
                await send_events(
                    first,
                    answer,
                    call,
                    begin=send,
                    send=scope["meshwright.raw_send"],
                    pause_s=desk.config.stream_interval_s,
                )
        except ApiError as fault:
            call.error = fault
            await fault.response()(scope, receive, send)
        except asyncio.CancelledError:
            call.error = why = call.take_abort_reason()
            if why is None:
                raise
            if not call.is_disconnected:
                await why.response()(scope, receive, send)
        except Exception:
            call.error = ApiError(500, "The server failed")
            raise
        finally:
            timer.cancel()
            if watch is not None:
                watch.cancel()
            desk.admission.requests.discard(call)
            await self._let_go(call, span, scope["path"])

    async def _let_go(self, context: RequestContext, span: TraceSpan | None, path: str) -> None:
        """Close what a request holds, and say on its span what it was."""
        for held in context.open_resources:
            await held.close()
            if span is not None:
                held.annotate_span(span)
        if span is not None:
            span.set_attribute("gen_ai.request.id", context.request_id)
            span.set_attribute("gen_ai.response.model", self._desk.config.model)
            span.set_attribute("url.path", path)
            if context.error is not None:
                record_error(span, context.error)
            span.end()


def json_reader(body: type[StructT]) -> BodyReader[StructT]:
    """Return what decodes small bodies, which may be empty."""

    async def read(data: bytes) -> StructT:
        return decode_body(data or b"{}", body)

    return read


def authenticate(app_state: AppState, headers: Headers, guard: RequiredKey) -> str:
    """Return whose request it is; empty where the server has no keys."""
    given = headers.get("authorization", "")
    if guard == "admin":
        origin, known = headers.get("origin"), app_state.config.allowed_origins
        if origin is not None and origin not in known and "*" not in known:
            # A page can send an empty body anywhere without asking first.
            raise ApiError(403, f"Pages of {origin} may change no engine", code="permission_denied")
        if len(app_state.admin_api_keys):
            if (
                app_state.admin_api_keys.authenticate(given) is None
                and app_state.api_keys.authenticate(given) is not None
            ):
                raise ApiError(
                    403, "This key may ask, but change no engine", code="permission_denied"
                )
            return _holder(app_state.admin_api_keys, given, "an admin key")
        if not app_state.config.allow_unauthenticated_admin:
            raise ApiError(
                403,
                "Administrative endpoints are disabled. Start the server with an admin key"
                " (MESHWRIGHT_ADMIN_API_KEY) or --allow-unauthenticated-admin.",
                code="permission_denied",
            )
    if not len(app_state.api_keys):
        return ""
    return _holder(app_state.api_keys, given, "an API key")


def _holder(keys: ApiKeys, given: str, what: str) -> str:
    holder = keys.authenticate(given)
    if holder is None:
        wrong = "Invalid API key." if given else f"This endpoint needs {what}."
        raise ApiError(401, f"{wrong} Send `Authorization: Bearer KEY`.", code="invalid_api_key")
    return holder


async def _read(headers: Headers, receive: Receive, most: int, limit_s: float) -> bytes:
    """Return the body, which must be JSON, not too large, and come in time."""
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "Request body is incomplete.", code="incomplete_body")
                part = message.get("body", b"")
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        what = f"The body took longer than {limit_s:g} s"
        raise ApiError(408, what, code="request_timeout") from None
    # Pages of a browser can send other types to any address without asking first.
    if size and kind != "application/json":
        raise ApiError(
            415,
            f"Unsupported Content-Type {kind!r}; use application/json.",
            code="unsupported_media_type",
        )
    return b"".join(parts)


async def _watch(receive: Receive, context: RequestContext) -> None:
    """Break a call off when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    context.abort_on_disconnect()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body is larger than {most} bytes", code="body_too_large")


def _too_long(limit_s: float) -> ApiError:
    return ApiError(504, f"The request took longer than {limit_s:g} s", code="timeout")
