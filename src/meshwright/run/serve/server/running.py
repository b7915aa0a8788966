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

import uvicorn
from starlette.applications import Starlette

from meshwright.errors import MissingPart
from meshwright.run.serve.server.desk import Desk
from meshwright.run.serve.server.settings import ServerSettings

STARTS_WITHIN_S = 30.0


class _Server(uvicorn.Server):
    """Drains before it closes its socket, so that whoever asks for its health still hears of it."""

    def __init__(self, config: uvicorn.Config, desk: Desk, drain_s: float) -> None:
        super().__init__(config)
        self._desk = desk
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.started_at: Callable[[str], object] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
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
        traffic = self._desk.traffic
        if traffic.hurried:
            self.should_exit = self.force_exit = True
        elif traffic.draining:
            traffic.hurried = True
        else:
            self.drain()

    def drain(self) -> None:
        """Begin to end; any thread may call it."""
        self._desk.traffic.draining = True
        # The loop may have ended meanwhile, and then there is nothing left to drain.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._desk.traffic.drain(self._drain_s)
        self.should_exit = True


def _server(app: Starlette, settings: ServerSettings) -> _Server:
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
        timeout_keep_alive=75,
        backlog=4096,
        lifespan="on",
        ws="none",
    )
    return _Server(config, app.state.desk, settings.drain_s)


def run_server(
    app: Starlette, settings: ServerSettings, *, started: Callable[[str], object] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, then end what is under way and return.

    Health turns 503 with the first signal, and new requests are refused; those under way have
    `drain_s` seconds. A second signal ends them at once, and they say so; a third one waits for
    no client. The access log goes to stderr. `started` is called with the address as soon as
    requests are taken.

    Raises:
        MissingPart: Where the address is taken.
    """
    _log_to_stderr()
    server = _server(app, settings)
    server.started_at = started
    try:
        server.run()
    except SystemExit:
        raise _no_address(settings) from None


def check_address(settings: ServerSettings) -> None:
    """Raise where nobody can listen there, before minutes go by in which weights are read.

    Raises:
        MissingPart: Where the port is taken, or the host is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        socket.create_server((settings.host, settings.port), family=found[0][0]).close()
    except OSError as error:
        raise _no_address(settings, error) from None


def _no_address(settings: ServerSettings, error: OSError | None = None) -> MissingPart:
    what = f"cannot listen on {settings.host}:{settings.port}"
    if error is None or error.errno in {errno.EADDRINUSE, errno.EACCES}:
        fix = "use another --port, or 0 for any"
    else:
        fix = "use an address of this machine as --host, such as 127.0.0.1 or 0.0.0.0"
    return MissingPart(f"{what}: {error.strerror}" if error else what, fix)


def _log_to_stderr() -> None:
    for name in ("meshwright.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler(sys.stderr))
            logger.addFilter(_is_no_end)
        logger.setLevel(logging.INFO if name == "meshwright.access" else logging.WARNING)


def _is_no_end(record: logging.LogRecord) -> bool:
    """Leave out what the server's end broke off: it was asked for, and is no error."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


class Served:
    """A server in a thread of this process: `with Served(app, settings) as served: served.url`."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        self._settings = settings
        self._server = _server(app, settings)
        self._thread = threading.Thread(target=self._run, name="meshwright-server", daemon=True)
        self._up = threading.Event()

    def _run(self) -> None:
        try:
            self._server.run()
        except SystemExit:
            pass
        finally:
            self._up.set()

    def __enter__(self) -> "Served":
        self._server.started_at = lambda _: self._up.set()
        self._thread.start()
        if not self._up.wait(STARTS_WITHIN_S) or not self._server.started:
            raise _no_address(self._settings)
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
