"""`Link`: the way to a worker, and `ProcessLink`: the one to a process of this machine."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import Protocol

from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.workers.process import MODULE
from meshwright.run.serve.worker.frames import (
    FromWorker,
    Ready,
    Start,
    ToWorker,
    framed,
    from_worker,
)
from meshwright.run.serve.worker.launch import EngineProcess


class Link(Protocol):
    """A worker whose engine is ready, as seen from the process that trains."""

    name: str
    """What people find it by, such as a process's number."""
    ready: Ready

    def send(self, message: ToWorker, /) -> None:
        """Send a message; where the worker is gone nothing happens, as `heard` says so."""

    def heard(self) -> Iterator[FromWorker]:
        """Yield what it says, until it is gone; used by a thread of its own."""

    def last_words(self) -> str:
        """Say how it ended."""

    def folder(self, offered: Offered, /) -> str:
        """Return where it finds versions."""

    def bring(self, offered: Offered, /) -> None:
        """Have the last version there before the worker is told to take it."""

    def end(self) -> None:
        """End it, if it is not gone."""


class ProcessLink:
    """The way to a process of this machine."""

    def __init__(self, start: Start, patience_s: float = 150.0, start_s: float = 300.0) -> None:
        """Start it, and wait until its engine is ready; raises what keeps it from that.

        `patience_s` is how long a message may wait to be taken, `start_s` how long the start may
        take; who takes longer is ended.
        """
        self._patience_s, self._why = patience_s, ""
        self._process = EngineProcess(start, MODULE, start_s=start_s)
        self.name, self.ready = f"process {self._process.pid}", self._process.ready
        self.pid = self._process.pid

    def send(self, message: ToWorker, /) -> None:
        """Send a message."""
        left, ready = memoryview(framed(message)), select.poll()
        until_s = time.monotonic() + self._patience_s
        with contextlib.suppress(OSError, ValueError):  # one that was ended has no socket
            while left and not self._why:
                try:
                    left = left[self._process.socket.send(left, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    wait_s = until_s - time.monotonic()
                    if wait_s > 0:
                        ready.register(self._process.socket, select.POLLOUT)
                        ready.poll(wait_s * 1000)
                        continue
                    self._why = f"it took no message for {self._patience_s:g} s (half of stall_s)"
                    self._process.end()

    def heard(self) -> Iterator[FromWorker]:
        """Yield what it says."""
        process, data = self._process, b""
        with contextlib.suppress(OSError):
            while True:
                for body in process.frames.add(data):
                    yield from_worker.decode(body)
                if not (data := process.socket.recv(1 << 20)):
                    return

    def last_words(self) -> str:
        """Say how it ended."""
        return self._why or self._process.last_words()

    def folder(self, offered: Offered, /) -> str:
        """Return where it finds versions: where they were posted."""
        return str(offered.folder)

    def bring(self, offered: Offered, /) -> None:
        """Do nothing: it reads what was posted where it lies."""

    def end(self) -> None:
        """End it."""
        self._process.end()
