"""`ProcessEngineClient`: an engine in a process of its own, started again when it dies.

The server's process only waits and writes, so that a step never waits for a stream. When the
engine's process ends, every answer under way ends with an error that says so, and another one is
started; until it is ready the server is not healthy, and new asks are refused.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.run.serve.client.engine_process import START_TIMEOUT_S, EngineProcess
from meshwright.run.serve.client.message_client import MessageEngineClient
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine_client import MEMORY_TAGS, EngineDeadError, MemoryTag
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.worker.protocol import (
    EngineHeartbeat,
    EngineMessage,
    StartEngine,
    UtilityCall,
    UtilityResult,
    WorkerMessage,
    encode_message,
    engine_message_decoder,
)

LOG = logging.getLogger("meshwright.server")
STEP_TIMEOUT_S = 60.0
"""An engine that is not heard for so long while requests are there is unhealthy."""
_RESTARTS, _WITHIN_S = 3, 300.0
"""An engine that dies more often in so long is given up."""


class ProcessEngineClient(MessageEngineClient):
    """Serves with an engine elsewhere on this machine, for one event loop: the first that asks."""

    def __init__(
        self,
        path: str | Path,
        settings: EngineConfig,
        *,
        threads: int | None = None,
        stuck_s: float = STEP_TIMEOUT_S,
        start_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start an engine for the model at a path, and wait until it is ready, for `start_s`.

        So long may a change of it take as well: it reads as much as a start does. On a processor it
        computes with so many `threads`; None takes what torch takes.
        """
        super().__init__()
        start = StartEngine(str(path), settings, threads=threads)
        self._closed = threading.Event()
        self._launch = partial(EngineProcess, start, start_s=start_s, given_up=self._closed)
        self._starting: asyncio.Task[EngineProcess] | None = None
        self._renewing: asyncio.Task[UtilityResult] | None = None
        self._stuck_s, self._change_s = stuck_s, start_s
        self.process = self._launch()
        self.ready_message = self.process.ready_message
        self.max_model_len, self.max_embed_len = (
            self.ready_message.max_model_len,
            self.ready_message.max_embed_len,
        )
        self._writer: asyncio.StreamWriter | None = None
        self._running: asyncio.Task[None] | None = None
        self._unsent: list[WorkerMessage] = []
        self._gauges = self.ready_message.stats
        self._unheard_since_s: float | None = None
        """Since when somebody waits and the process says nothing; None where nobody does."""
        self._before = EngineStats()
        """What processes that ended had counted, as far as they were heard."""
        self._why = ""
        """Why no asks are taken at the moment."""
        self._deaths: list[float] = []
        self._asleep: frozenset[MemoryTag] = frozenset()
        """What it has given back."""
        self._renewed = ""
        """The folder that weights were last read from, where they were replaced."""
        self._stale = ""
        """Why a process that was started again has not got these weights."""
        self._changes = 0
        """Changes under way: while it reads weights it says nothing, and has a deadline for it."""

    async def sleep(self, level: int) -> None:
        """Give memory back; level 1 keeps the weights in host memory."""
        await super().sleep(level)
        self._asleep = frozenset(MEMORY_TAGS)

    async def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Take the memory of some parts again."""
        await super().wake_up(parts)
        self._asleep = self._asleep.difference(parts)

    def is_sleeping(self) -> bool:
        """Tell whether any part of it sleeps."""
        return bool(self._asleep)

    async def update_weights(self, path: str) -> None:
        """Read the weights of a folder in place of the present ones."""
        await super().update_weights(path)
        self._renewed, self._stale = path, ""

    def stats(self) -> EngineStats:
        """Return what the engine did when it was last heard, and those that ended before it."""
        return self._gauges.add_counters(self._before)

    def health_problem(self) -> str:
        """Say why the engine is unhealthy; empty where it is healthy."""
        if self._why or self._stale:
            return self._why or self._stale
        self._listen()
        if self._unheard_since_s is not None and not self._changes:
            silent_s = time.monotonic() - self._unheard_since_s
            if silent_s > self._stuck_s:
                return f"the engine has not been heard for {silent_s:.0f} s"
        return ""

    async def close(self) -> None:
        """End the process, also one that starts; answers under way end with an error."""
        self._closed.set()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._fail_all("the engine was closed")
        if self._starting is not None:
            (begun,) = await asyncio.gather(self._starting, return_exceptions=True)
            if isinstance(begun, EngineProcess):
                self.process = begun
        await asyncio.to_thread(self.process.stop)

    # The process.

    def _listen(self) -> None:
        """Begin to listen, in the event loop of whoever calls first."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Listen to the process, and to the next when it ends, until one ends too often."""
        while True:
            why = await self._heard_out()
            self._deaths = [at for at in self._deaths if time.monotonic() - at < _WITHIN_S]
            self._deaths.append(time.monotonic())
            self._gauges, self._before = EngineStats(), self.stats()
            self._fail_all(f"{why}; another one is starting")
            if len(self._deaths) > _RESTARTS:
                self._why = f"{why}, {len(self._deaths)} times in a row: it is given up"
                LOG.error(self._why)
                return
            LOG.warning(self._why)
            await asyncio.sleep(0.1 * 4 ** len(self._deaths))
            self._starting = asyncio.create_task(asyncio.to_thread(self._launch))
            try:
                # Who closes waits until it has been ended, or is there to be ended.
                self.process = await asyncio.shield(self._starting)
            except MeshwrightError as error:
                self._why = f"{why}, and another one cannot be started: {error}"
                LOG.error(self._why)
                return
            self.ready_message, self._asleep = self.process.ready_message, frozenset()
            self._gauges = self.ready_message.stats
            LOG.warning("the engine's process is there again")

    async def _heard_out(self) -> str:
        """Listen to the process until it ends; return why it did."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.process.socket)
        frames = self.process.frame_decoder
        self._why = self._stale = ""
        if self._deaths and self._renewed:
            self._renew_again()
        for message in self._unsent:
            self._send(message)
        self._unsent = []
        try:
            while data := await reader.read(1 << 20):
                for body in frames.feed(data):
                    self._dispatch(engine_message_decoder.decode(body))
                # Who gave up in a silence does not end it, so only what is heard sets this back.
                waits = self._open or self._calls
                self._unheard_since_s = time.monotonic() if waits else None
        except OSError:
            pass
        finally:
            self._writer.close()
            self._writer = None
        return await asyncio.to_thread(self.process.exit_reason)

    def _renew_again(self) -> None:
        """Have a new process read the weights that the last one had, before it answers anything."""
        # Until then others may answer: whoever waited here would wait for minutes.
        self._stale = reading = f"the engine reads the weights of {self._renewed} again"

        def settled(future: "asyncio.Task[UtilityResult]") -> None:
            if not future.cancelled() and (error := future.exception()):
                self._stale = f"weights of {self._renewed} cannot be read again: {error}"
            elif self._stale == reading:
                self._stale = ""

        call = UtilityCall(self._next_number(), "update_weights", path=self._renewed)
        # It is sent at once, before anything else that the process is asked.
        self._renewing = asyncio.create_task(self._settled(call, self._begun(call)))
        self._renewing.add_done_callback(settled)

    async def _settled(
        self, call: UtilityCall, done: "asyncio.Future[UtilityResult]"
    ) -> UtilityResult:
        """Wait for the end of a call; who does not come to the end of a change is ended."""
        if call.method == "embed":  # it waits for its turn, and so does whoever asked for it
            return await done
        self._changes += 1
        try:
            async with asyncio.timeout(self._change_s):
                return await done
        except TimeoutError:
            await asyncio.to_thread(self.process.kill)
            what = f"the engine did not {call.method.replace('_', ' ')} within {self._change_s:g} s"
            raise EngineDeadError(
                f"{what}, and was ended: raise --startup-timeout (start_s)"
            ) from None
        finally:
            self._changes -= 1

    def _dispatch(self, message: EngineMessage) -> None:
        if isinstance(message, EngineHeartbeat):
            self._gauges = message.stats
        else:
            super()._dispatch(message)

    def _require_ready(self, what: str, /) -> None:
        # New weights mend an engine whose last ones are gone.
        if self._why or (self._stale and what != "update_weights"):
            raise EngineDeadError(self._why or self._stale)
        self._listen()

    def _send(self, message: WorkerMessage) -> None:
        if self._unheard_since_s is None:
            # An engine that nobody asks says nothing, which is no silence.
            self._unheard_since_s = time.monotonic()
        if self._writer is None:
            self._unsent.append(message)
        elif not self._writer.is_closing():
            self._writer.write(encode_message(message))

    def _fail_all(self, why: str) -> None:
        self._why, self._unsent, self._unheard_since_s = why, [], None
        super()._fail_all(why)
