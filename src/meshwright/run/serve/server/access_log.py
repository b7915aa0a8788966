"""`AccessLogMiddleware`: request ids, one access-log line per request, status counters."""

import logging
import re
import secrets
from time import monotonic

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.metrics import ServerMetrics

ACCESS_LOG = logging.getLogger("meshwright.access")
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
HTTP_METHODS = {"GET", "POST", "HEAD", "OPTIONS"}


class AccessLogMiddleware:
    """Access-log middleware: request id, status counters, one log line per request."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, paths: frozenset[str], *, log: bool
    ) -> None:
        self._app = app
        self._figures = metrics
        self._paths = paths
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if REQUEST_ID_PATTERN.fullmatch(given) else secrets.token_hex(12)
        scope["meshwright.name"] = name
        scope["meshwright.raw_send"] = send
        status = 0
        header = (b"x-request-id", name.encode())

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        self._figures.requests_in_progress += 1
        try:
            await self._app(scope, receive, send_named)
        except Exception:
            if not status:
                # The log has the details, which are no business of the client's.
                broken = ApiError(500, "The server failed; its log says why").response()
                await broken(scope, receive, send_named)
            raise
        finally:
            self._figures.requests_in_progress -= 1
            # Clients choose paths and methods; counters must not grow with them.
            path = scope["path"] if scope["path"] in self._paths else "other"
            method = scope["method"] if scope["method"] in HTTP_METHODS else "other"
            # 499: the client was gone before there was a status to send.
            told = status or 499
            self._figures.http_statuses[method, path, str(told)] += 1
            if self._log:
                _tell(scope, name, path, told, monotonic() - begun)


def _tell(scope: Scope, name: str, path: str, status: int, took_s: float) -> None:
    """Write the line of a request: neither its query nor its headers, where secrets may be."""
    line: dict[str, object] = {
        "request": name,
        "client": (scope.get("client") or ("",))[0],
        "method": scope["method"],
        "path": path,
        "status": status,
        "took_ms": round(took_s * 1000, 1),
    }
    call = scope.get("meshwright.call")
    if isinstance(call, RequestContext):
        line["prompt_tokens"] = call.prompt_tokens
        line["output_tokens"] = call.output_tokens
        if call.tenant:
            line["key"] = call.tenant
        if call.is_disconnected:
            line["left"] = True
        elif call.error is not None:
            line["error"] = call.error.summary()
    ACCESS_LOG.info(msgspec.json.encode(line).decode())
