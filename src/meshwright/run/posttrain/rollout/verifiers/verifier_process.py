"""`VerifierProcess`: one bounded child that judges, seen from the process that asks it.

The child has none of this process's environment variables, files or working folder, no shell, and a
session of its own, so that it can be ended with whatever it started. These are bounds against
verifiers that hang, leak or flood. They are no sandbox: files that this user may read it can read.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollout.verifiers import child_main
from meshwright.run.posttrain.rollout.verifiers.verifier_job import (
    VerifierLimits,
    VerifierStartError,
)

_CHILD = str(Path(child_main.__file__).resolve())
# Only the library on the path, no start-up code of users or packages, no files beside modules.
_COMMAND = [sys.executable, "-P", "-s", "-S", "-B", _CHILD]
END_S = 5.0
"""How long a process that was killed, or is heard no more, may take to be gone."""


class VerifierReply(msgspec.Struct, frozen=True):
    """What the child says of one check."""

    number: int
    outcome: Literal["ok", "memory", "output", "error"]
    value: float
    reason: str
    took_s: float


class ChildExit(NamedTuple):
    """The child ended, or said what it must not, instead of answering."""

    outcome: Literal["timeout", "output", "died"]
    reason: str


class _Ready(msgspec.Struct, frozen=True):
    digests: dict[str, str]
    refused: list[str]
    fault: str


class VerifierProcess:
    """A child; used by one thread at a time."""

    def __init__(self, verifiers: Sequence[str], limits: VerifierLimits) -> None:
        """Start it and let it load the verifiers, within the limits."""
        self._limits, self._buffer, self.completed_jobs = limits, bytearray(), 0
        with contextlib.ExitStack() as undo:
            try:
                # What a verifier started may still write there when it is cleared away.
                self._folder = tempfile.TemporaryDirectory(
                    prefix="meshwright-verifier-", ignore_cleanup_errors=True
                )
                undo.callback(self._folder.cleanup)
                self._socket, theirs = socket.socketpair()
                undo.callback(self._socket.close)
                with theirs:
                    self._process = subprocess.Popen(
                        _COMMAND,
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        cwd=self._folder.name,
                        env=_environment(self._folder.name),
                        start_new_session=True,
                    )
            except OSError as error:
                raise VerifierStartError(
                    f"cannot start a process for verifiers: {error}"
                ) from error
            undo.pop_all()
        try:
            self.digests, self.unsupported_limits = self._load(verifiers)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def send(self, jobs: Sequence[tuple[int, str, dict[str, Any]]]) -> None:
        """Give it checks, each with its number; `read_reply` gets the answers, in their order."""
        with contextlib.suppress(OSError):  # a child that is gone is seen by who waits for it
            self._socket.settimeout(self._limits.deadline_s)
            self._socket.sendall(child_main.encode_frame(jobs))

    def read_reply(self) -> VerifierReply | ChildExit:
        """Wait for the answer to the next check, at most until its deadline."""
        body = self._frame(self._limits.deadline_s)
        if isinstance(body, ChildExit):
            return body
        try:
            answer = msgspec.json.decode(body, type=VerifierReply)
        except msgspec.DecodeError as error:
            return ChildExit("output", f"it answered what cannot be read: {error}")
        self.completed_jobs += 1
        return answer

    def kill(self) -> None:
        """Kill it with all it started, from any thread; who waits for its reply hears of it."""
        if self._process.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill it, and clear away; it keeps nothing that would be lost."""
        self.kill()
        # One that is stuck in the system ends when the system lets it; nobody waits for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._socket.close()
        self._folder.cleanup()

    def _load(self, verifiers: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        limits, names = self._limits, ", ".join(verifiers)
        start = {
            **msgspec.structs.asdict(limits),
            "folder": self._folder.name,
            "path": [str(Path(each).resolve()) for each in sys.path],
            "verifiers": list(verifiers),
        }
        with contextlib.suppress(OSError):
            self._socket.settimeout(limits.start_s)
            self._socket.sendall(child_main.encode_frame(start))
        body = self._frame(limits.start_s)
        if isinstance(body, ChildExit):
            late = f"not loaded within {limits.start_s:g} s"
            what = late if body.outcome == "timeout" else f"loading ended: {body.reason}"
            fix = "import less there, or raise start_s or memory_bytes"
            raise InputError([Problem(f"verifier {names}", what, fix)])
        ready = msgspec.json.decode(body, type=_Ready)
        if ready.fault:
            name, _, fault = ready.fault.partition(": ")
            fix = "name it as module:function, at the top level of a module on the path"
            raise InputError([Problem(f"verifier {name}", f"cannot be loaded: {fault}", fix)])
        return ready.digests, tuple(ready.refused)

    def _frame(self, within_s: float) -> bytes | ChildExit:
        """Return the next frame that comes before the time is over."""
        until = time.monotonic() + within_s
        # Beside the reason there are the names of fields and a few numbers.
        most = self._limits.output_bytes + 4096
        size = child_main.HEADER.size
        while True:
            if len(self._buffer) >= size:
                (length,) = child_main.HEADER.unpack_from(self._buffer)
                if length > most:
                    return ChildExit("output", f"it answered {length:,} bytes, {most:,} are read")
                if len(self._buffer) >= size + length:
                    body = bytes(self._buffer[size : size + length])
                    del self._buffer[: size + length]
                    return body
            left = until - time.monotonic()
            if left <= 0:
                return ChildExit("timeout", "")
            try:
                self._socket.settimeout(left)
                part = self._socket.recv(1 << 16)
            except TimeoutError:
                return ChildExit("timeout", "")
            except OSError:
                part = b""
            if not part:
                return self._ended()
            self._buffer += part

    def _ended(self) -> ChildExit:
        """Say how a child ended whose socket is closed."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return ChildExit("died", "it closed its socket")
        if code in (-signal.SIGXCPU, -signal.SIGALRM):
            return ChildExit("timeout", "")
        if code < 0:
            return ChildExit("died", f"it was ended by {signal.Signals(-code).name}")
        return ChildExit("died", f"it ended with code {code}")


def require_json_payload(job: dict[str, Any]) -> None:
    """Raise where JSON cannot carry a job, before it is queued."""
    try:
        json.dumps(job)
    except (TypeError, ValueError) as error:
        fix = "give numbers, texts, lists and dicts of them"
        raise InputError([Problem("job", f"JSON cannot carry it: {error}", fix)]) from error


def _environment(folder: str) -> dict[str, str]:
    """Return all that the child is told: nothing of ours, which may hold keys."""
    return {
        "HOME": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "PYTHONHASHSEED": "0",
        "TMPDIR": folder,
    }
