"""`Door`: the name of each request, its line in the access log, and the count of its status."""

import logging
import re
import secrets
from time import monotonic

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.run.serve.server.faults import Fault
from meshwright.run.serve.server.metrics import Figures
from meshwright.run.serve.server.traffic import Call

ACCESS = logging.getLogger("meshwright.access")
SAFE_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
METHODS = {"GET", "POST", "HEAD", "OPTIONS"}


class Door:
    """Stands before everything else; knows neither bodies nor keys, so that it can tell none."""

    def __init__(self, app: ASGIApp, figures: Figures, paths: frozenset[str], *, log: bool) -> None:
        self._app = app
        self._figures = figures
        self._paths = paths
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if SAFE_NAME.fullmatch(given) else secrets.token_hex(12)
        scope["meshwright.name"] = name
        scope["meshwright.send"] = send
        status = 0
        header = (b"x-request-id", name.encode())

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        self._figures.under_way += 1
        try:
            await self._app(scope, receive, send_named)
        except Exception:
            if not status:
                # The log has the details, which are no business of the client's.
                broken = Fault(500, "The server failed; its log says why").response()
                await broken(scope, receive, send_named)
            raise
        finally:
            self._figures.under_way -= 1
            # Clients choose paths and methods; counters must not grow with them.
            path = scope["path"] if scope["path"] in self._paths else "other"
            method = scope["method"] if scope["method"] in METHODS else "other"
            # 499: the client was gone before there was a status to send.
            told = status or 499
            self._figures.statuses[method, path, str(told)] += 1
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
    if isinstance(call, Call):
        line["prompt_tokens"] = call.prompt_tokens
        line["output_tokens"] = call.output_tokens
        if call.tenant:
            line["key"] = call.tenant
        if call.gone:
            line["left"] = True
        elif call.fault is not None:
            line["error"] = call.fault.told()
    ACCESS.info(msgspec.json.encode(line).decode())
