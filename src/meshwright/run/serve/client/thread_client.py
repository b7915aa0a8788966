"""`ThreadEngineClient`: an engine in a thread of its own, asked from an event loop.

The thread is an `EngineWorker` as the process of an engine is one, but for messages that stay in
this process. Where the engine breaks, all that is under way ends with an error, and its health says
why.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from meshwright.errors import InputError, Problem
from meshwright.run.serve.client.message_client import MessageEngineClient
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.lifecycle import EngineLifecycle
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.worker.engine_worker import EngineWorker, create_utility_handler
from meshwright.run.serve.worker.protocol import (
    EngineHeartbeat,
    EngineMessage,
    UtilityCall,
    UtilityResult,
    WorkerMessage,
)

STEP_TIMEOUT_S = 60.0
"""After so long without a step while requests are there, an engine is unhealthy."""
_T = TypeVar("_T")


class ThreadEngineClient(MessageEngineClient):
    """Serves with an engine, for one event loop: the first that asks."""

    def __init__(
        self,
        engine: Engine,
        lifecycle: EngineLifecycle | None = None,
        *,
        stuck_s: float = STEP_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.max_model_len, self.max_embed_len = engine.max_model_len, engine.max_embed_len
        self._upkeep = lifecycle
        perform = _reject_calls if lifecycle is None else create_utility_handler(lifecycle)
        self._worker = EngineWorker(self._deliver, engine, perform)
        self._stuck_s = stuck_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False
        self._broke = ""
        self._turning_since: float | None = None
        self._thread: threading.Thread | None = None

    def is_sleeping(self) -> bool:
        """Tell whether any part of it sleeps."""
        return self._upkeep is not None and self._upkeep.is_sleeping

    def stats(self) -> EngineStats:
        """Return what the engine does at this moment."""
        return self.engine.stats()

    def health_problem(self) -> str:
        """Say why the engine is unhealthy; empty where it is healthy."""
        if self._broke:
            return self._broke
        since = self._turning_since
        if since is not None and time.monotonic() - since > self._stuck_s:
            return f"engine step has not finished for {time.monotonic() - since:.0f} s"
        return ""

    async def close(self) -> None:
        """End the thread; answers under way end with an error."""
        self._ending = True
        self._worker.post()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30)
        self.engine.close()
        self._fail_all("the engine was closed")

    def _require_ready(self, _: str, /) -> None:
        if self._broke:
            raise EngineDeadError(self._broke)

    def _send(self, message: WorkerMessage) -> None:
        self._worker.post(message)
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def _fail_all(self, why: str) -> None:
        self._broke = self._broke or why
        super()._fail_all(why)

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turning_since = time.monotonic()
                more = self._worker.run_step()
                self._turning_since = None
                if not more:
                    self._worker.wait_for_messages()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            self._broke = f"the engine broke: {type(error).__name__}: {error}"
            self._call_in_loop(self._fail_all, self._broke)

    def _deliver(self, message: EngineMessage) -> None:
        # Whoever wants figures of an engine that is here asks for them.
        if not isinstance(message, EngineHeartbeat):
            self._call_in_loop(self._dispatch, message)

    def _call_in_loop(self, what: Callable[[_T], object], given: _T) -> None:
        assert self._loop is not None, "somebody asked"
        # It may be closed already when the last pieces are ready.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, given)


def _reject_calls(_: UtilityCall) -> UtilityResult:
    what = "this engine only answers"
    raise InputError([Problem("engine", what, "make it with start_engine")])
