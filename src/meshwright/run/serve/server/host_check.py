"""`HostCheckMiddleware`: refuses requests whose `Host` header names another server.

A page in a browser may send requests to a server on the visitor's machine under a name of its own
that resolves to 127.0.0.1 (DNS rebinding). Such a request has that name in its `Host` header.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from meshwright.http_pages.allowed_hosts import AllowedHosts
from meshwright.run.serve.server.api_errors import ApiError

MAX_SHOWN_CHARS = 100


class HostCheckMiddleware:
    """Passes requests on that name an allowed host."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 403."""
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._hosts.is_allowed(value.decode("latin-1")):
                    await _not_allowed(value).response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _not_allowed(host: bytes) -> ApiError:
    shown = host[:MAX_SHOWN_CHARS].decode("latin-1")
    return ApiError(
        403,
        f"The host {shown!r} is not allowed. Start the server with --allowed-hosts to add it.",
        code="host_not_allowed",
    )
