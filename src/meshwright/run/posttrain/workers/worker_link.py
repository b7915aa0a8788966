"""`WorkerLink`: connection to a worker; `ProcessWorkerLink`: to a process of this machine."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import Protocol

from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender
from meshwright.run.posttrain.workers.worker_main import WORKER_MODULE
from meshwright.run.serve.client.engine_process import EngineProcess
from meshwright.run.serve.worker.protocol import (
    EngineMessage,
    EngineReady,
    StartEngine,
    WorkerMessage,
    encode_message,
    engine_message_decoder,
)


class WorkerLink(Protocol):
    """A worker whose engine is ready, as seen from the process that trains."""

    name: str
    """What people find it by, such as a process's number."""
    ready_message: EngineReady

    def send(self, message: WorkerMessage, /) -> None:
        """Send a message; nothing happens where the worker is gone: `receive_messages` says so."""

    def receive_messages(self) -> Iterator[EngineMessage]:
        """Yield what it says, until it is gone; used by a thread of its own."""

    def exit_reason(self) -> str:
        """Say how it ended."""

    def version_folder(self, sender: WeightSender, /) -> str:
        """Return where it finds versions."""

    def deliver_version(self, sender: WeightSender, /) -> None:
        """Have the last version there before the worker is told to take it."""

    def stop(self) -> None:
        """End it, if it is not gone."""


class ProcessWorkerLink:
    """The way to a process of this machine."""

    def __init__(
        self, start: StartEngine, patience_s: float = 150.0, start_s: float = 300.0
    ) -> None:
        """Start it, and wait until its engine is ready; raises what keeps it from that.

        `patience_s` is how long a message may wait to be taken, `start_s` how long the start may
        take; who takes longer is ended.
        """
        self._patience_s, self._why = patience_s, ""
        self._process = EngineProcess(start, WORKER_MODULE, start_s=start_s)
        self.name, self.ready_message = f"process {self._process.pid}", self._process.ready_message
        self.pid = self._process.pid

    def send(self, message: WorkerMessage, /) -> None:
        """Send a message."""
        left, ready = memoryview(encode_message(message)), select.poll()
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
                    self._why = (
                        f"it took no message for {self._patience_s:g} s (half of stall_timeout_s)"
                    )
                    self._process.stop()

    def receive_messages(self) -> Iterator[EngineMessage]:
        """Yield what it says."""
        process, data = self._process, b""
        with contextlib.suppress(OSError):
            while True:
                for body in process.frame_decoder.feed(data):
                    yield engine_message_decoder.decode(body)
                if not (data := process.socket.recv(1 << 20)):
                    return

    def exit_reason(self) -> str:
        """Say how it ended."""
        return self._why or self._process.exit_reason()

    def version_folder(self, sender: WeightSender, /) -> str:
        """Return where it finds versions: where they were posted."""
        return str(sender.folder)

    def deliver_version(self, sender: WeightSender, /) -> None:
        """Do nothing: it reads what was posted where it lies."""

    def stop(self) -> None:
        """End it."""
        self._process.stop()
