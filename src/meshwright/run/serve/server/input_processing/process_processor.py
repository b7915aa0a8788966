"""`ProcessInputProcessor`: requests prepared in processes with bounded time and memory.

Small bodies have a process of their own, so that they do not wait behind large ones. A process that
takes too long is ended and another one started; so is one that breaks. The event loop only moves
bytes.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.run.serve.frame_codec import encode_frame
from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.input_processing import protocol
from meshwright.run.serve.server.input_processing.prepared_request import (
    InputLimits,
    Prepared,
    RequestKind,
)
from meshwright.run.serve.server.input_processing.protocol import (
    FromPreparer,
    PreparationFailed,
    PreparedHead,
    PrepareRequest,
    PreparerReady,
    StartPreparing,
)
from meshwright.run.serve.server.server_config import ServerConfig

LOG = logging.getLogger("meshwright.server")
SMALL_BODY_BYTES = 2**17
MAX_WAITING_BYTES = 2**28
"""Bodies that may wait for a process; where they are more, requests are refused with 429."""
MODULE = "meshwright.run.serve.server.input_processing.preparer_process"
START_TIMEOUT_S = 120.0
LARGE_BODY_NICENESS = 10
"""Priority below that of the engine and of the event loop, which share the machine."""
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2", "RUST_BACKTRACE": "0"}


class ProcessInputProcessor:
    """Prepares requests elsewhere on this machine, for one event loop."""

    def __init__(self, model_path: str | Path, config: ServerConfig) -> None:
        """Start the processes for small bodies; that for large ones starts with the first one."""
        small, large = (
            StartPreparing(str(model_path), config, config.input_memory_bytes, niceness)
            for niceness in (0, LARGE_BODY_NICENESS)
        )
        count = config.input_processes or max(1, min(4, (os.cpu_count() or 1) // 4))
        self._small = [PreparerLane(small, config.input_timeout_s) for _ in range(count)]
        self._large = PreparerLane(large, config.input_timeout_s)
        for lane in self._small:
            lane.start()
        self._waiting_bytes = 0
        self._exchanges: set[asyncio.Future[Prepared]] = set()

    async def process(self, kind: RequestKind, body: bytes, limits: InputLimits) -> Prepared:
        """Return what a body asks for; raises `ApiError` where it cannot be answered."""
        if self._waiting_bytes + len(body) > MAX_WAITING_BYTES:
            what = "The requests that wait are too large. Retry after 5 s."
            raise ApiError(429, what, code="queue_full", retry_after_s=5)
        lane = self._large
        if len(body) <= SMALL_BODY_BYTES:
            lane = min(self._small, key=lambda small: small.waiting)
        self._waiting_bytes += len(body)
        lane.waiting += 1
        # An exchange that has begun goes on to its end, also where its client leaves.
        exchange = asyncio.ensure_future(lane.exchange(PrepareRequest(kind, limits), body))
        self._exchanges.add(exchange)
        exchange.add_done_callback(lambda done: self._forget(lane, len(body), done))
        return await asyncio.shield(exchange)

    def _forget(self, lane: "PreparerLane", size: int, done: "asyncio.Future[Prepared]") -> None:
        self._waiting_bytes -= size
        lane.waiting -= 1
        self._exchanges.discard(done)
        if not done.cancelled():
            done.exception()  # whoever waited for it may be gone

    async def close(self) -> None:
        """End the processes, and whatever waits for them."""
        self.kill()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the loop

    def kill(self) -> None:
        """End the processes for good."""
        for lane in (*self._small, self._large):
            lane.close()

    @property
    def pids(self) -> Sequence[int]:
        """The processes that run."""
        lanes = (*self._small, self._large)
        return [lane.pid for lane in lanes if lane.pid is not None]


class PreparerLane:
    """One process, which prepares one request at a time."""

    def __init__(self, start: StartPreparing, timeout_s: float) -> None:
        self._start, self._timeout_s = start, timeout_s
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._is_closed = False
        self.waiting = 0
        """Requests that it prepares, or that wait for it."""

    @property
    def pid(self) -> int | None:
        """The process's number, where there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", MODULE, str(theirs.fileno())]
            # Of its own session, so that a terminal's signals reach the server alone.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(),
            )
        ours.sendall(encode_frame(protocol.encode(self._start)))
        self._socket = ours

    def close(self) -> None:
        """End the process, and start no other one."""
        self._is_closed = True
        self.kill()

    def kill(self) -> None:
        """End the process."""
        if self._streams is not None:
            with contextlib.suppress(RuntimeError):  # its event loop may be closed already
                self._streams[1].transport.abort()
        elif self._socket is not None:
            self._socket.close()
        self._streams = self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def exchange(self, request: PrepareRequest, body: bytes) -> Prepared:
        """Have a body prepared when it is its turn."""
        async with self._turn:
            try:
                reader, writer = await self._ready()
            except (OSError, EOFError, TimeoutError) as error:
                self.kill()
                if not self._is_closed:
                    LOG.warning("the process that prepares requests does not start: %r", error)
                raise _broken("does not start") from None
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._exchanged(reader, writer, request, body)
            except TimeoutError:
                self.kill()
                raise ApiError(
                    504,
                    f"Reading, rendering and tokenising the request took longer than"
                    f" {self._timeout_s:g} s",
                    code="timeout",
                ) from None
            except (OSError, EOFError):
                self.kill()
                raise _broken("broke: it may have needed more memory than it is granted") from None
            except asyncio.CancelledError:
                self.kill()
                raise

    async def _exchanged(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: PrepareRequest,
        body: bytes,
    ) -> Prepared:
        writer.write(encode_frame(protocol.encode(request)))
        writer.write(len(body).to_bytes(4, "little"))
        writer.write(body)
        await writer.drain()
        answer = await _read(reader)
        if isinstance(answer, PreparationFailed):
            if answer.is_last:
                self.kill()
            raise answer.to_error()
        if not isinstance(answer, PreparedHead):
            raise EOFError
        head = answer.prepared
        parts = []
        for _ in range(answer.parts):
            part = await _read_frame(reader)
            parts.append(protocol.decode_part(head, part))
            await asyncio.sleep(0)
        if answer.is_last:
            self.kill()
        return protocol.join(head, parts)

    async def _ready(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._is_closed:
            raise EOFError
        if self._process is not None and self._process.poll() is not None:
            self.kill()
        if self._streams is None:
            if self._socket is None:
                await asyncio.to_thread(self.start)
            line, self._socket = self._socket, None
            reader, writer = await asyncio.open_connection(sock=line, limit=2**20)
            self._streams = reader, writer
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await _read(reader)
            if isinstance(answer, PreparationFailed):
                self.kill()
                raise answer.to_error()
            assert isinstance(answer, PreparerReady)
        return self._streams


def _environment() -> dict[str, str]:
    """Return the environment of such a process, which needs no keys of clients."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("API_KEY")}
    return {**kept, **_ENVIRONMENT}


async def _read(reader: asyncio.StreamReader) -> FromPreparer:
    return protocol.decode_from_preparer(await _read_frame(reader))


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return await reader.readexactly(int.from_bytes(head, "little"))


def _broken(how: str) -> ApiError:
    what = f"The process that prepares requests {how}; the server's log may say why"
    return ApiError(503, what, code="input_processor_failed", retry_after_s=5)
