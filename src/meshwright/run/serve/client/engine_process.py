"""`EngineProcess`: starts the process of an engine and waits until it takes asks."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.frame_codec import FrameDecoder
from meshwright.run.serve.kv_transfer.transport import get_shared_memory_folder
from meshwright.run.serve.worker.protocol import (
    EngineReady,
    RequestRejected,
    StartEngine,
    encode_message,
    engine_message_decoder,
)

START_TIMEOUT_S = 1800.0
"""How long an engine may take to be ready: large weights on a slow disk take a while."""
_POLL_S = 0.2
_END_S = 2.0
_ENDING_S = 10.0
"""How long a process that is heard no more may take to end: on a busy machine, seconds."""


class EngineStartTimeoutError(EngineDeadError):
    """An engine was not ready by its deadline."""


class EngineProcess:
    """A process that serves this one, over a socket that only this user can open."""

    def __init__(
        self,
        start: StartEngine,
        module: str = "meshwright.run.serve.worker",
        *,
        start_s: float = START_TIMEOUT_S,
        given_up: threading.Event | None = None,
    ) -> None:
        """Start it, and wait until the engine is ready; raises what keeps it from that.

        `module` is what runs there: it calls `worker_process.main`. What is not ready after
        `start_s` seconds is ended, and so is what is not when it is `given_up`.
        """
        self._start_s, self._until_s = start_s, time.monotonic() + start_s
        self._given_up = given_up or threading.Event()
        self._parcels_at = get_shared_memory_folder()
        start = msgspec.structs.replace(start, kv_transfer_folder=self._parcels_at)
        self.frame_decoder = FrameDecoder()
        """What came behind the first message, for whoever goes on listening."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            path = str(Path(folder) / "engine")
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(path)
            listening.listen(1)
            listening.settimeout(_POLL_S)
            command = [sys.executable, "-m", module, path]
            # Of its own session, so that a terminal's signals reach the server alone.
            self._process = subprocess.Popen(command, start_new_session=True)
            try:
                with listening:
                    self.socket = self._accepted(listening)
            except BaseException:
                self.kill()
                raise
        try:
            self.socket.settimeout(start_s)
            self.socket.sendall(encode_message(start))
            self.socket.settimeout(_POLL_S)
            self.ready_message = self._wait()
        except TimeoutError:
            self.stop()
            raise self._late() from None
        except OSError as error:  # it was gone before it had read what to start
            why = self.exit_reason()
            self.stop()
            raise EngineDeadError(why) from error
        except BaseException:
            self.stop()
            raise
        self.socket.settimeout(None)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def stop(self) -> None:
        """End the process: by closing its socket, or where it is stuck in a step by force."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._clear()

    def exit_reason(self) -> str:
        """Say how it ended."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_ENDING_S)
            self._clear()
        if code is not None and code < 0:
            return f"the engine's process was ended by {signal.Signals(-code).name}"
        return f"the engine's process ended{'' if code is None else f' with code {code}'}"

    def _accepted(self, listening: socket.socket) -> socket.socket:
        while True:
            with contextlib.suppress(TimeoutError):
                return listening.accept()[0]
            if self._process.poll() is not None:
                raise EngineDeadError(self.exit_reason())
            self._check_wanted()

    def _wait(self) -> EngineReady:
        for body in self._bodies():
            message = engine_message_decoder.decode(body)
            if isinstance(message, EngineReady):
                return message
            if isinstance(message, RequestRejected):
                raise InputError([Problem(*each) for each in message.problems])
        raise EngineDeadError(self.exit_reason())

    def _bodies(self) -> Iterator[bytes]:
        data = b""
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                self._check_wanted()
                continue
            if not data:
                return
            yield from self.frame_decoder.feed(data)

    def _check_wanted(self) -> None:
        """Raise where nobody waits any longer."""
        if self._given_up.is_set():
            raise EngineDeadError(
                f"the engine's process {self.pid} was given up before it was ready"
            )
        if time.monotonic() > self._until_s:
            raise self._late()

    def _late(self) -> EngineStartTimeoutError:
        what = f"the engine's process {self.pid} was not ready within {self._start_s:g} s"
        fix = "look at what it said above, or raise --startup-timeout (start_s)"
        return EngineStartTimeoutError(f"{what}, and was ended: {fix}")

    def kill(self) -> None:
        """End the process by force, with the ranks it started."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        # One that is stuck in a driver ends when the driver lets it; nobody waits for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _clear(self) -> None:
        """Take parcels away that a process which was killed has left in shared memory."""
        shutil.rmtree(self._parcels_at, ignore_errors=True)
