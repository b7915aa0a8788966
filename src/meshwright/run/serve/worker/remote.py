"""`RemoteEngine`: an engine in a process of its own, started again when it dies.

The server's process only waits and writes, so that a step never waits for a stream. When the
engine's process ends, every answer under way ends with an error that says so, and another one is
started; until it is ready the server is not healthy, and new asks are refused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.serve.asked import Ask, Gauges
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.inbox import Inbox
from meshwright.run.serve.interface import MEMORY, EngineBroken, Memory
from meshwright.run.serve.parcels import ParcelLost
from meshwright.run.serve.worker.frames import (
    Answered,
    Asked,
    Beat,
    Call,
    Cancel,
    Done,
    FromWorker,
    Ready,
    Refused,
    Start,
    ToWorker,
    framed,
    from_worker,
)
from meshwright.run.serve.worker.launch import START_S, EngineProcess

LOG = logging.getLogger("meshwright.server")
STUCK_S = 60.0
"""An engine that is not heard for so long while requests are there is ill."""
_RESTARTS, _WITHIN_S = 3, 300.0
"""An engine that dies more often in so long is given up."""


class RemoteEngine:
    """Serves with an engine elsewhere on this machine, for one event loop: the first that asks."""

    def __init__(
        self,
        path: str | Path,
        settings: EngineSettings,
        *,
        threads: int | None = None,
        stuck_s: float = STUCK_S,
        start_s: float = START_S,
    ) -> None:
        """Start an engine for the model at a path, and wait until it is ready, for `start_s`.

        On a processor it computes with so many `threads`; None takes what torch takes.
        """
        start = Start(str(path), settings, threads=threads)
        self._launch = partial(EngineProcess, start, start_s=start_s)
        self._stuck_s = stuck_s
        self.process = self._launch()
        self.ready = self.process.ready
        self.max_length = self.ready.max_length
        self._writer: asyncio.StreamWriter | None = None
        self._running: asyncio.Task[None] | None = None
        self._open: dict[int, Inbox] = {}
        self._calls: dict[int, asyncio.Future[Done]] = {}
        self._unsent: list[ToWorker] = []
        self._number = 0
        self._gauges, self._heard_s = Gauges(), time.monotonic()
        self._before = Gauges()
        """What processes that ended had counted, as far as they were heard."""
        self._why = ""
        """Why no asks are taken at the moment."""
        self._deaths: list[float] = []
        self._asleep: frozenset[Memory] = frozenset()
        """What it has given back."""
        self._renewed = ""
        """The folder that weights were last read from, where they were replaced."""
        self._stale = ""
        """Why a process that was started again has not got these weights."""

    def answer(self, ask: Ask) -> Inbox:
        """Answer; closing what is returned cancels what is left."""
        number = self._next_number()

        def give_up() -> None:
            self._open.pop(number, None)
            if not self._why:
                self._send(Cancel(number))

        inbox = Inbox(ask.sampling.n, give_up)
        try:
            self._require()
        except EngineBroken as error:
            inbox.refuse(error)
            return inbox
        self._open[number] = inbox
        self._send(Asked(number, ask))
        return inbox

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        number = self._next_number()
        done = await self._call(Call(number, "embed", prompts=list(prompts), adapter=adapter))
        return done.vectors

    async def sleep(self, level: int) -> None:
        """Give memory back; level 1 keeps the weights in host memory."""
        await self._call(Call(self._next_number(), "sleep", level=level))
        self._asleep = frozenset(MEMORY)

    async def wake(self, parts: Collection[Memory] = MEMORY) -> None:
        """Take the memory of some parts again."""
        await self._call(Call(self._next_number(), "wake", parts=tuple(parts)))
        self._asleep = self._asleep.difference(parts)

    def asleep(self) -> bool:
        """Tell whether any part of it sleeps."""
        return bool(self._asleep)

    async def update_weights(self, path: str) -> None:
        """Read the weights of a folder in place of the present ones."""
        await self._call(Call(self._next_number(), "update_weights", path=path))
        self._renewed, self._stale = path, ""

    def gauges(self) -> Gauges:
        """Return what the engine did when it was last heard, and those that ended before it."""
        return self._gauges.after(self._before)

    def ill(self) -> str:
        """Say why no forward progress is made; empty where all is well."""
        if self._why or self._stale:
            return self._why or self._stale
        self._listen()
        silent_s = time.monotonic() - self._heard_s
        if (self._open or self._calls) and silent_s > self._stuck_s:
            return f"the engine has not been heard for {silent_s:.0f} s"
        return ""

    async def close(self) -> None:
        """End the process; answers under way end with an error."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._fail("the engine was closed")
        await asyncio.to_thread(self.process.end)

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
            self._gauges, self._before = Gauges(), self.gauges()
            self._fail(f"{why}; another one is starting")
            if len(self._deaths) > _RESTARTS:
                self._why = f"{why}, {len(self._deaths)} times in a row: it is given up"
                LOG.error(self._why)
                return
            LOG.warning(self._why)
            await asyncio.sleep(0.1 * 4 ** len(self._deaths))
            try:
                self.process = await asyncio.to_thread(self._launch)
            except MeshwrightError as error:
                self._why = f"{why}, and another one cannot be started: {error}"
                LOG.error(self._why)
                return
            self.ready, self._asleep = self.process.ready, frozenset()
            LOG.warning("the engine's process is there again")

    async def _heard_out(self) -> str:
        """Listen to the process until it ends; return why it did."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.process.socket)
        self._why, self._heard_s, frames = "", time.monotonic(), self.process.frames
        self._stale = ""
        if self._deaths and self._renewed:
            self._renew_again()
        for message in self._unsent:
            self._send(message)
        self._unsent = []
        try:
            while data := await reader.read(1 << 20):
                self._heard_s = time.monotonic()
                for body in frames.add(data):
                    self._hear(from_worker.decode(body))
        except OSError:
            pass
        finally:
            self._writer.close()
            self._writer = None
        return await asyncio.to_thread(self.process.last_words)

    def _renew_again(self) -> None:
        """Have a new process read the weights that the last one had, before it answers anything."""

        def settled(future: "asyncio.Future[Done]") -> None:
            if not future.cancelled() and (error := future.exception()):
                self._stale = f"weights of {self._renewed} cannot be read again: {error}"

        call = Call(self._next_number(), "update_weights", path=self._renewed)
        self._begun(call).add_done_callback(settled)

    def _hear(self, message: FromWorker) -> None:
        match message:
            case Answered(pieces):
                for number, piece in pieces:
                    if (inbox := self._open.get(number)) is not None:
                        inbox.put(piece)
                        if inbox.whole:
                            del self._open[number]
            case Beat(gauges):
                self._gauges = gauges
            case Ready():
                pass
            case Done(number):
                self._settle(number, lambda call: call.set_result(message))
            case Refused(number, problems, lost):
                error = ParcelLost(lost) if lost else _wrong(problems)
                if (inbox := self._open.pop(number, None)) is not None:
                    inbox.refuse(error)
                self._settle(number, lambda call: call.set_exception(error))

    def _settle(self, number: int, how: Callable[["asyncio.Future[Done]"], None]) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            how(call)

    async def _call(self, call: Call) -> Done:
        # New weights mend an engine whose last ones are gone.
        if self._why or call.what != "update_weights":
            self._require()
        self._listen()
        return await self._begun(call)

    def _begun(self, call: Call) -> "asyncio.Future[Done]":
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._calls[call.number] = done
        self._send(call)
        return done

    def _require(self) -> None:
        if self._why or self._stale:
            raise EngineBroken(self._why or self._stale)
        self._listen()

    def _send(self, message: ToWorker) -> None:
        if self._writer is None:
            self._unsent.append(message)
        elif not self._writer.is_closing():
            self._writer.write(framed(message))

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _fail(self, why: str) -> None:
        self._why, self._unsent = why, []
        under_way, self._open = self._open, {}
        for inbox in under_way.values():
            inbox.break_off(why)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineBroken(why))
        self._calls.clear()


def _wrong(problems: list[tuple[str, str, str]]) -> InputError:
    return InputError([Problem(*each) for each in problems])
