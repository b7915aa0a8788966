"""`EngineLoop`: an engine in a thread of its own, asked from an event loop.

What the event loop wants of the engine waits in an inbox until the thread has ended its turn. The
pieces of one turn come back in one go. Where the engine breaks, every answer under way ends with an
error, and its health says why.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.serve.asked import Ask, Gauges, Piece, Sink
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.doing import HalfRenewed
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.upkeep import Upkeep
from meshwright.run.serve.inbox import Inbox
from meshwright.run.serve.interface import MEMORY, EngineBroken, Memory
from meshwright.run.serve.parcels import Parcel, collect

STUCK_S = 60.0
"""After so long without a step while requests are there, an engine is ill."""
_T = TypeVar("_T")


class EngineLoop:
    """Serves with an engine, for one event loop: the first that asks."""

    def __init__(
        self, engine: Engine, upkeep: Upkeep | None = None, *, stuck_s: float = STUCK_S
    ) -> None:
        self.engine, self.max_length = engine, engine.max_length
        self._upkeep = upkeep
        self._stuck_s = stuck_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake, self._ending = threading.Event(), False
        self._open: dict[int, Inbox] = {}
        """Asks under way, for the case that the engine breaks."""
        self._fetching: set[asyncio.Task[None]] = set()
        self._asked = 0
        self._broke = ""
        self._turning_since: float | None = None
        self._thread: threading.Thread | None = None

    def answer(self, ask: Ask) -> Inbox:
        """Answer; closing what is returned cancels what is left."""
        answers: list[Answer] = []
        self._asked += 1
        number = self._asked

        def give_up() -> None:
            self._open.pop(number, None)
            if not self._broke:
                self._post(lambda: self.engine.cancel(answers))

        inbox = Inbox(ask.sampling.n, give_up)

        def sink(piece: Piece) -> None:
            inbox.put(piece)
            if inbox.whole:
                self._open.pop(number, None)

        def add(brought: bytearray | None = None) -> None:
            if not inbox.whole:
                self._post(lambda: answers.extend(self.engine.add(ask, sink, brought)))

        try:
            self.engine.check(ask)
            self._require()
        except (InputError, EngineBroken) as error:
            inbox.refuse(error)
            return inbox
        self._open[number] = inbox
        if ask.brought is None:
            add()
        else:
            task = asyncio.create_task(self._fetch(ask.brought, inbox, number, add))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        return inbox

    async def _fetch(
        self, parcel: Parcel, inbox: Inbox, number: int, add: Callable[[bytearray], None]
    ) -> None:
        """Fetch what an ask comes with; it may take a while, in which others go on."""
        try:
            add(await asyncio.to_thread(collect, parcel))
        except MeshwrightError as error:
            self._open.pop(number, None)
            inbox.refuse(error)

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        return await self._between(lambda: self._kept().embed(prompts, adapter=adapter))

    async def sleep(self, level: int) -> None:
        """Give memory back; level 1 keeps the weights in host memory."""
        await self._between(lambda: self._kept().sleep(level))

    async def wake(self, parts: Collection[Memory] = MEMORY) -> None:
        """Take the memory of some parts again."""
        await self._between(lambda: self._kept().wake(parts))

    def asleep(self) -> bool:
        """Tell whether any part of it sleeps."""
        return self._upkeep is not None and self._upkeep.asleep

    async def update_weights(self, path: str) -> None:
        """Read the weights of a folder in place of the present ones."""
        await self._between(lambda: self._kept().update_weights(path))

    def _kept(self) -> Upkeep:
        if self._upkeep is None:
            what = "this engine only answers"
            raise InputError([Problem("engine", what, "make it with start_engine")])
        return self._upkeep

    def gauges(self) -> Gauges:
        """Return what the engine does at this moment."""
        return self.engine.gauges()

    def ill(self) -> str:
        """Say why no forward progress is made; empty where all is well."""
        if self._broke:
            return self._broke
        since = self._turning_since
        if since is not None and time.monotonic() - since > self._stuck_s:
            return f"a step has not ended for {time.monotonic() - since:.0f} s"
        return ""

    async def close(self) -> None:
        """End the thread; answers under way end with an error."""
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30)
        self.engine.close()
        self._fail("the engine was closed")

    def _require(self) -> None:
        if self._broke:
            raise EngineBroken(self._broke)

    async def _between(self, work: Callable[[], _T]) -> _T:
        """Do something with the engine between two of its turns."""
        self._require()
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def settle(result: _T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def job() -> None:
            try:
                result = work()
            except Exception as error:
                self._tell(settle, None, error)
                if isinstance(error, HalfRenewed):
                    raise
            else:
                self._tell(settle, result, None)

        self._post(job)
        return await done

    def _post(self, job: Callable[[], object]) -> None:
        self._inbox.append(job)
        self._wake.set()
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def _tell(self, what: Callable[..., object], *given: object) -> None:
        assert self._loop is not None, "somebody asked"
        # It may be closed already when the last pieces are ready.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *given)

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            self._broke = f"the engine broke: {type(error).__name__}: {error}"
            self._tell(self._fail, self._broke)

    def _turn(self) -> None:
        self._turning_since = time.monotonic()
        while self._inbox:
            self._inbox.popleft()()
        worked = self.engine.turn()
        ready = self.engine.outbox()
        if ready:
            self._tell(_deliver, ready)
        self._turning_since = None
        if not worked and not self._inbox:
            self._wake.wait()
            self._wake.clear()

    def _fail(self, why: str) -> None:
        self._broke = self._broke or why
        under_way, self._open = self._open, {}
        for inbox in under_way.values():
            inbox.break_off(why)


def _deliver(ready: list[tuple[Sink, Piece]]) -> None:
    for sink, piece in ready:
        sink(piece)
