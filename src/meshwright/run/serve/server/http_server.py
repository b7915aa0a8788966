"""`run_server`: the application behind a socket, until a signal ends it."""

import asyncio
import contextlib
import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from meshwright.errors import MissingDependency
from meshwright.run.serve.log_formatter import SafeLogFormatter
from meshwright.run.serve.server.app_state import AppState
from meshwright.run.serve.server.http_connection import create_connection_class
from meshwright.run.serve.server.server_config import ServerConfig

STARTUP_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 75
"""How long a connection is kept for further requests."""
MAX_CONNECTIONS = 65536
"""Files that a server asks the system for."""


class _Server(uvicorn.Server):
    """Drains before it closes its socket, so that whoever asks for its health still hears of it."""

    def __init__(self, config: uvicorn.Config, app_state: AppState, drain_s: float) -> None:
        super().__init__(config)
        self._desk = app_state
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.started_at: Callable[[str], object] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        for one in sockets or ():
            # The next server need not wait until the system forgets the connections of this one.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        if self.started and self.started_at is not None:
            self.started_at(self.url())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything, the engine too where uvicorn would leave it for lack of time."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def url(self) -> str:
        """Return where it is reached, without a slash at the end."""
        name = self.servers[0].sockets[0].getsockname()
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"http://{host}:{name[1]}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """End gently at the first signal, soon at the second, at once at the third."""
        traffic = self._desk.admission
        if traffic.must_drain_now:
            self.should_exit = self.force_exit = True
        elif traffic.is_draining:
            traffic.must_drain_now = True
        else:
            self.drain()

    def drain(self) -> None:
        """Begin to end; any thread may call it."""
        self._desk.admission.is_draining = True
        # The loop may have ended meanwhile, and then there is nothing left to drain.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._desk.admission.drain(self._drain_s)
        self.should_exit = True


def _server(app: Starlette, settings: ServerConfig) -> _Server:
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        # The name and version of what serves is nobody's business.
        server_header=False,
        # An address that a client may write itself is no address.
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        # Longer than proxies and clients keep a connection, so that it is they who let go of it.
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=4096,
        lifespan="on",
        http=create_connection_class(settings),
        ws="none",
    )
    return _Server(config, app.state.desk, settings.shutdown_timeout_s)


def run_server(
    app: Starlette,
    settings: ServerConfig,
    *,
    started: Callable[[str], object] | None = None,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then end what is under way and return.

    Health turns 503 with the first signal, and new requests are refused; those under way have
    `shutdown_timeout_s` seconds. A second signal ends them at once, and they say so; a third one
    waits for no client. The access log goes to stderr. `started` is called with the address as soon
    as requests are taken; `sockets` are what `bind_socket` gave, where somebody called it before.

    Raises:
        MissingDependency: Where the address is taken.
    """
    _log_to_stderr()
    _allow_many_connections()
    server = _server(app, settings)
    server.started_at = started
    try:
        server.run(sockets or bind_socket(settings))
    except SystemExit:
        raise _not_started() from None
    except OSError as error:
        raise _no_address(settings, error) from None


def _allow_many_connections() -> None:
    """Let this process hold as many files as it may: each client is one.

    Many systems begin with 1,024, and where there are more clients the system hangs up on them
    before anybody here hears of it.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind_socket(settings: ServerConfig) -> list[socket.socket]:
    """Take the address, before minutes go by in which weights are read; nobody listens there yet.

    Whoever asks meanwhile is refused, and so is another server that wants the same port.

    Raises:
        MissingDependency: Where the port is taken, or the host is no address of this machine.
    """
    taken, absent = list[socket.socket](), list[OSError]()
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            try:
                taken.append(_bound(family, address))
            except OSError as error:
                # A name may have addresses of both kinds, and a machine those of one.
                if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                    raise
                absent.append(error)
        if not taken:
            raise absent[0]
    except OSError as error:
        for one in taken:
            one.close()
        raise _no_address(settings, error) from None
    return taken


def _bound(family: int, address: Any) -> socket.socket:
    """Return a socket that has an address for itself.

    One that may be shared with what its predecessor left open is taken only where there is such:
    two servers that start at once could both have it until they listen.
    """
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            one.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
    except OSError:
        one.close()
        raise
    return one


def _not_started() -> MissingDependency:
    return MissingDependency("the server did not start", "its log says why")


def _no_address(settings: ServerConfig, error: OSError) -> MissingDependency:
    what = f"cannot listen on {settings.host}:{settings.port}"
    if error.errno in {errno.EADDRINUSE, errno.EACCES}:
        fix = "use another --port, or 0 for any"
    else:
        fix = "use an address of this machine as --host, such as 127.0.0.1 or 0.0.0.0"
    return MissingDependency(f"{what}: {error.strerror}", fix)


def _log_to_stderr() -> None:
    for name in ("meshwright.access", "meshwright.server", "meshwright.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(SafeLogFormatter())
            logger.addHandler(handler)
            logger.addFilter(_is_no_end)
        logger.setLevel(logging.INFO if name == "meshwright.access" else logging.WARNING)


def _is_no_end(record: logging.LogRecord) -> bool:
    """Leave out what the server's end broke off: it was asked for, and is no error."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


class BackgroundServer:
    """A server in a thread of this process.

    `with BackgroundServer(app, config) as server:` starts it; `server.url` is its address.
    """

    def __init__(self, app: Starlette, settings: ServerConfig) -> None:
        self._settings = settings
        self._server = _server(app, settings)
        self._up = threading.Event()

    def _run(self, sockets: list[socket.socket]) -> None:
        try:
            self._server.run(sockets)
        except SystemExit:
            pass
        finally:
            self._up.set()

    def __enter__(self) -> "BackgroundServer":
        self._server.started_at = lambda _: self._up.set()
        self._thread = threading.Thread(
            target=self._run,
            args=(bind_socket(self._settings),),
            name="meshwright-server",
            daemon=True,
        )
        self._thread.start()
        if not self._up.wait(STARTUP_TIMEOUT_S) or not self._server.started:
            raise _not_started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drain()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where it is reached, without a slash at the end."""
        return self._server.url()

    def drain(self) -> None:
        """Begin to end, as a signal would."""
        self._server.drain()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._thread.join()
