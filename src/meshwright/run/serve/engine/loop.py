"""`EngineLoop`: an engine in a thread of its own, asked from an event loop.

The thread is a `Worker` as the process of an engine is one, but for messages that stay in this
process. Where the engine breaks, all that is under way ends with an error, and its health says why.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from meshwright.errors import InputError, Problem
from meshwright.run.serve.asked import Gauges
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.upkeep import Upkeep
from meshwright.run.serve.interface import EngineBroken
from meshwright.run.serve.worker.caller import Caller
from meshwright.run.serve.worker.frames import Beat, Call, Done, FromWorker, ToWorker
from meshwright.run.serve.worker.worker import Worker, performer

STUCK_S = 60.0
"""After so long without a step while requests are there, an engine is ill."""
_T = TypeVar("_T")


class EngineLoop(Caller):
    """Serves with an engine, for one event loop: the first that asks."""

    def __init__(
        self, engine: Engine, upkeep: Upkeep | None = None, *, stuck_s: float = STUCK_S
    ) -> None:
        super().__init__()
        self.engine = engine
        self.max_length, self.embed_length = engine.max_length, engine.embed_length
        self._upkeep = upkeep
        perform = _nothing_else if upkeep is None else performer(upkeep)
        self._worker = Worker(self._tell, engine, perform)
        self._stuck_s = stuck_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False
        self._broke = ""
        self._turning_since: float | None = None
        self._thread: threading.Thread | None = None

    def asleep(self) -> bool:
        """Tell whether any part of it sleeps."""
        return self._upkeep is not None and self._upkeep.asleep

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
        self._worker.take()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30)
        self.engine.close()
        self._fail("the engine was closed")

    def _require(self, _: str, /) -> None:
        if self._broke:
            raise EngineBroken(self._broke)

    def _send(self, message: ToWorker) -> None:
        self._worker.take(message)
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def _fail(self, why: str) -> None:
        self._broke = self._broke or why
        super()._fail(why)

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turning_since = time.monotonic()
                more = self._worker.turn()
                self._turning_since = None
                if not more:
                    self._worker.rest()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            self._broke = f"the engine broke: {type(error).__name__}: {error}"
            self._later(self._fail, self._broke)

    def _tell(self, message: FromWorker) -> None:
        # Whoever wants figures of an engine that is here asks for them.
        if not isinstance(message, Beat):
            self._later(self._hear, message)

    def _later(self, what: Callable[[_T], object], given: _T) -> None:
        assert self._loop is not None, "somebody asked"
        # It may be closed already when the last pieces are ready.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, given)


def _nothing_else(_: Call) -> Done:
    what = "this engine only answers"
    raise InputError([Problem("engine", what, "make it with start_engine")])
