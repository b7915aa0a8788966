"""What runs inside a verifier's process: sets its own limits, loads verifiers, judges one by one.

It is started by its path and imports the standard library alone, so that it starts quickly and the
limits hold before anything else is loaded. Frames of JSON come and go over the socket that it was
given as its standard input; what a verifier prints goes nowhere.
"""

import hashlib
import importlib
import json
import math
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<I")
MAX_REWARD = 3.4028234663852886e38
"""Of float32, in which rewards are trained on: what lies beyond would be infinite there."""
_ORPHAN_S = 5.0
"""A check that nobody ended this long after its deadline has lost who should have."""

Verifier = Callable[[Mapping[str, Any]], object]


def apply_limits(given: Mapping[str, Any]) -> list[str]:
    """Set the limits of this process; return those that the system refused."""
    wanted = {
        "RLIMIT_AS": given["memory_bytes"],
        "RLIMIT_FSIZE": given["output_bytes"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    if not given["processes"]:
        wanted["RLIMIT_NPROC"] = 0
    refused = []
    for name, value in wanted.items():
        try:
            which = getattr(resource, name)
            _, hard = resource.getrlimit(which)
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (most, most))
        except (AttributeError, ValueError, OSError):
            refused.append(name)
    return refused


def import_verifiers(names: list[str]) -> tuple[dict[str, Verifier], dict[str, str], str]:
    """Import verifiers; return them, digests of their modules, and what went wrong if anything."""
    found: dict[str, Verifier] = {}
    digests: dict[str, str] = {}
    for name in names:
        module_name, _, function = name.partition(":")
        try:
            module = importlib.import_module(module_name)
            found[name] = getattr(module, function)
        except BaseException as error:  # noqa: BLE001  a module may do anything while it loads
            return found, digests, f"{name}: {type(error).__name__}: {error}"
        source = getattr(module, "__file__", None)
        written = Path(source).read_bytes() if source else b""
        digests[name] = hashlib.blake2b(written, digest_size=8).hexdigest()
    return found, digests, ""


def run_verifier(verifier: Verifier, job: Mapping[str, Any]) -> dict[str, Any]:
    """Call a verifier; whatever it does short of ending the process becomes an outcome."""
    try:
        value, reason = _score(verifier(job))
    except MemoryError:
        return {"outcome": "memory", "value": 0.0, "reason": "it ran out of memory"}
    except BaseException as error:  # noqa: BLE001  also SystemExit: one check is no reason to end
        return {"outcome": "error", "value": 0.0, "reason": f"{type(error).__name__}: {error}"}
    if not abs(value) <= MAX_REWARD:
        what = f", and float32 ends at {MAX_REWARD:.2g}" if math.isfinite(value) else ""
        return {"outcome": "error", "value": 0.0, "reason": f"its score is {value}{what}"}
    return {"outcome": "ok", "value": value, "reason": reason}


def _score(answer: Any) -> tuple[float, str]:
    try:
        score, reason = answer if isinstance(answer, tuple) else (answer, "")
        if isinstance(score, str | bytes):
            raise TypeError  # "1.0" is what a model wrote, and no verdict on it
        return float(score), str(reason)
    except (TypeError, ValueError):
        what = f"it returned a {type(answer).__name__}, not a score, or a score and a reason"
        raise TypeError(what) from None


# Framed as by `serve/frame_codec.py`, on purpose in a copy: this process imports the standard
# library alone.


def read_frame(connection: socket.socket) -> Any:
    """Return the next frame; None where there are no more."""
    head = _exactly(connection, HEADER.size)
    body = None if head is None else _exactly(connection, HEADER.unpack(head)[0])
    return None if body is None else json.loads(body)


def encode_frame(message: object) -> bytes:
    """Return a message as a frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        if not (part := connection.recv(count - len(parts))):
            return None
        parts += part
    return bytes(parts)


def _bound_time(deadline_s: float) -> None:
    """Let the system end a check that goes on after its deadline, should the pool be gone."""
    signal.setitimer(signal.ITIMER_REAL, deadline_s + _ORPHAN_S)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = math.ceil(usage.ru_utime + usage.ru_stime + deadline_s + _ORPHAN_S)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or allowed < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))


def _answer(reply: dict[str, Any], most: int) -> bytes:
    frame = encode_frame(reply)
    if len(frame) - HEADER.size > most:
        reason = f"it answered {len(frame):,} bytes, at most {most:,} are read"
        return encode_frame({**reply, "outcome": "output", "value": 0.0, "reason": reason})
    return frame


def main() -> None:
    """Serve until the socket closes."""
    # Whoever started this may have blocked or ignored what has to end it.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    start = read_frame(connection)
    refused = apply_limits(start)
    sys.path[:] = start["path"]
    verifiers, digests, fault = import_verifiers(start["verifiers"])
    connection.sendall(encode_frame({"digests": digests, "refused": refused, "fault": fault}))
    while (jobs := read_frame(connection)) is not None:
        for number, name, job in jobs:
            _bound_time(start["deadline_s"])
            began = time.perf_counter()
            reply = run_verifier(verifiers[name], job)
            took_s = time.perf_counter() - began
            reply |= {"number": number, "took_s": took_s}
            connection.sendall(_answer(reply, start["output_bytes"]))
        signal.setitimer(signal.ITIMER_REAL, 0)
    # Who asks ends this process by force, so it is gone itself and cannot tidy up.
    shutil.rmtree(start["folder"], ignore_errors=True)


if __name__ == "__main__":
    main()
