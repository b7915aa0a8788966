"""Does slow work one piece after the other beside the watch, and hands back what it found."""

import queue
import threading
import time
from collections.abc import Callable

from meshwright.observe.watch.agent.error_log import ErrorLog

ResultCallback = Callable[[], None]
"""Told in the watch's own thread, so that only one thread changes what it knows."""


class BackgroundWorker:
    """A thread with a queue."""

    def __init__(self, log: ErrorLog) -> None:
        self._log = log
        self._asked: queue.SimpleQueue[Callable[[], ResultCallback] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[ResultCallback] = queue.SimpleQueue()
        self._open = 0
        self._thread: threading.Thread | None = None

    def submit(self, errand: Callable[[], ResultCallback]) -> None:
        """Have something done; what it returns is called by `deliver_results`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="errands", daemon=True)
            self._thread.start()
        self._open += 1
        self._asked.put(errand)

    @property
    def num_pending(self) -> int:
        """How many have been sent and not told of."""
        return self._open

    def deliver_results(self) -> None:
        """Take in what has been found."""
        while not self._found.empty():
            found = self._found.get()
            self._open -= 1
            found()

    def drain(self, within_s: float) -> None:
        """Wait for all that was asked, but not for ever."""
        until = time.monotonic() + within_s
        while self._open and time.monotonic() < until:
            self.deliver_results()
            time.sleep(0.02)
        self.deliver_results()
        self._asked.put(None)

    def _work(self) -> None:
        while (errand := self._asked.get()) is not None:
            try:
                found = errand()
            except Exception:  # noqa: BLE001 - the watch goes on without it
                self._log.write("an errand failed")
                found = _nothing
            self._found.put(found)


def _nothing() -> None:
    """Nothing was found."""
