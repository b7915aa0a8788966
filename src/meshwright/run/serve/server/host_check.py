"""`HostCheckMiddleware`: refuses requests whose `Host` header names another server.

A page in a browser may send requests to a server on the visitor's machine under a name of its own
that it lets point to 127.0.0.1 (DNS rebinding). Such a request carries that name as its host.
Clients that send no host at all are no browsers.
"""

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.server_config import ServerConfig

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_SHOWN_CHARS = 100


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Return the hosts that requests may name; None where any will do."""
    given = [host.lower() for host in config.allowed_hosts]
    if "*" in given or (not given and not is_loopback(config.host)):
        return None
    return frozenset(map(_without_port, [*LOOPBACK_HOSTS, config.host.lower(), *given]))


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HostCheckMiddleware:
    """Lets requests pass that name an allowed host."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 403."""
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == b"host"]
            for host in given:
                if _without_port(host.decode("latin-1").lower()) not in self._hosts:
                    await _not_allowed(host).response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    """Return a host as it is compared: without a port, brackets, or a dot at the end."""
    host = host.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.partition(":")[0]
    return host.removesuffix(".")


def _not_allowed(host: bytes) -> ApiError:
    shown = host[:MAX_SHOWN_CHARS].decode("latin-1")
    return ApiError(
        403,
        f"The host {shown!r} is not allowed. Start the server with --allowed-hosts to add it.",
        code="host_not_allowed",
    )
