"""`VerifierProcess`: the processes that judge, seen from the process that asks them.

They have none of this process's environment variables, files or working folder, and are isolated by
what `sandbox` finds on this kernel: `status` says what that is. Where nothing there keeps them from
reading this process's memory and environment, this process forbids it.
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

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.run.posttrain.rollout.reward_component import VerifierOutcome
from meshwright.run.posttrain.rollout.verifiers import child_main
from meshwright.run.posttrain.rollout.verifiers.frames import HEADER, encode_frame
from meshwright.run.posttrain.rollout.verifiers.sandbox.privileges import forbid_inspection
from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import (
    SandboxConfig,
    SandboxStatus,
)
from meshwright.run.posttrain.rollout.verifiers.verifier_job import (
    VerifierLimits,
    VerifierStartError,
)

_CHILD = str(Path(child_main.__file__).resolve())
# Only the library on the path, no start-up code of users or packages, no files beside modules.
_COMMAND = [sys.executable, "-P", "-s", "-S", "-B", _CHILD]
_LAYERS = SandboxConfig._field_defaults["layers"]
_PROGRAM_GRACE_S = 0.5
"""Programs are ended at their deadline by the process that watches them, which then answers."""
END_S = 5.0
"""How long a process that was killed, or is heard no more, may take to be gone."""


class VerifierReply(msgspec.Struct, frozen=True):
    """What the child says of one check."""

    number: int
    outcome: VerifierOutcome
    value: float
    reason: str
    took_s: float


class ChildExit(NamedTuple):
    """The child ended, or said what it must not, instead of answering."""

    outcome: Literal["timeout", "output", "died"]
    reason: str


class _Ready(msgspec.Struct, frozen=True):
    digests: dict[str, str]
    status: SandboxStatus
    fault: str
    runs_programs: bool


class VerifierProcess:
    """A child; used by one thread at a time."""

    def __init__(self, verifiers: Sequence[str], limits: VerifierLimits) -> None:
        """Start it and let it load the verifiers, within the limits."""
        self._limits, self._buffer = limits, bytearray()
        self.digests: dict[str, str] = {}
        """Of the verifiers' modules."""
        self.status = SandboxStatus((), {})
        """What isolates it."""
        self._patience_s = limits.deadline_s
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
            self._load(verifiers)
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
            self._socket.sendall(encode_frame(jobs))

    def read_reply(self) -> VerifierReply | ChildExit:
        """Wait for the answer to the next check, at most until its deadline."""
        body = self._frame(self._patience_s)
        if isinstance(body, ChildExit):
            return body
        try:
            answer = msgspec.json.decode(body, type=VerifierReply)
        except msgspec.DecodeError as error:
            return ChildExit("output", f"it answered what cannot be read: {error}")
        return answer

    def kill(self) -> None:
        """End it with all it started, from any thread; who waits for its reply hears of it."""
        if self._process.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(OSError):
                os.kill(self._process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Kill it, and clear away; it keeps nothing that would be lost."""
        self.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # One that is stuck in the system ends when the system lets it; nobody waits for that.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._socket.close()
        with contextlib.suppress(RecursionError):  # a program may have nested folders
            self._folder.cleanup()

    def _load(self, verifiers: Sequence[str]) -> None:
        limits, names = self._limits, ", ".join(verifiers)
        start = {
            **msgspec.structs.asdict(limits),
            "folder": self._folder.name,
            "layers": [] if limits.isolation == "none" else sorted(_LAYERS),
            "verifiers": list(verifiers),
        }
        with contextlib.suppress(OSError):
            self._socket.settimeout(limits.start_s)
            self._socket.sendall(encode_frame(start))
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
        self.digests, self.status = ready.digests, ready.status
        if ready.runs_programs:
            self._patience_s += _PROGRAM_GRACE_S
        unprotected = self.status.find_unprotected()
        if limits.isolation == "strict" and unprotected:
            raise _describe_missing(self.status)
        if limits.isolation != "none" and "secrets" in unprotected:
            with contextlib.suppress(OSError):
                forbid_inspection()

    def _frame(self, within_s: float) -> bytes | ChildExit:
        """Return the next frame that comes before the time is over."""
        until = time.monotonic() + within_s
        # Beside the reason, as JSON escapes it, there are the names of fields and a few numbers.
        most = 6 * self._limits.output_bytes + 4096
        size = HEADER.size
        while True:
            if len(self._buffer) >= size:
                (length,) = HEADER.unpack_from(self._buffer)
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


def _describe_missing(status: SandboxStatus) -> MissingDependency:
    """Say what `strict` misses."""
    missing = "; ".join(f"{name}: {why}" for name, why in sorted(status.missing.items()))
    what = (
        f"isolation = 'strict' is asked for, and nothing on this system protects "
        f"{', '.join(status.find_unprotected())} ({missing or 'it is not Linux'})"
    )
    fix = "run on Linux 5.13 or newer with Landlock and seccomp, or use isolation = 'best-effort'"
    return MissingDependency(what, fix)


def _environment(folder: str) -> dict[str, str]:
    """Return all that the child is told: nothing of ours, which may hold keys."""
    return {
        "HOME": folder,
        "MESHWRIGHT_VERIFIER_PATH": json.dumps([str(Path(each).resolve()) for each in sys.path]),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "PYTHONHASHSEED": "0",
        "TMPDIR": folder,
    }
