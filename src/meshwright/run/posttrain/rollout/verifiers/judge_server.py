"""The server of a verifier's process: takes checks, and hands them to processes that judge.

Verifiers run in a worker that it forks, within the limits; the worker has no descriptor of the
socket over which verdicts leave, and what it says is checked here. Verifiers that are marked
`uses_program_sandbox` run here, and put programs into processes of their own.
"""

import contextlib
import hashlib
import importlib
import json
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from meshwright.run.posttrain.rollout.verifiers.frames import (
    FrameTooLargeError,
    encode_frame,
    read_frame,
)
from meshwright.run.posttrain.rollout.verifiers.program_sandbox import (
    ProgramSandbox,
    list_python_paths,
    wants_program_sandbox,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.namespaces import mount_private_files
from meshwright.run.posttrain.rollout.verifiers.sandbox.process_tree import adopt_orphans
from meshwright.run.posttrain.rollout.verifiers.sandbox.resource_limits import limit_processor_time
from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import (
    LayerRecord,
    SandboxConfig,
)
from meshwright.run.posttrain.rollout.verifiers.verifier_outcome import (
    Verdict,
    read_verdict,
    run_verifier,
)

_ORPHAN_S = 5.0
"""A check that nobody ended this long after its deadline has lost who should have."""
_OTHER_FIELDS = 4096
"""Bytes of a verdict beside its reason."""

Verifier = Callable[..., object]
Check = tuple[int, str, Mapping[str, Any]]
"""Its number, the name of its verifier, and its job."""


def read_config(start: Mapping[str, Any]) -> SandboxConfig:
    """Return what verifiers may do, as the first message says."""
    layers = SandboxConfig._field_defaults["layers"]
    return SandboxConfig(
        folder=start["folder"],
        memory_bytes=start["memory_bytes"],
        file_bytes=start["output_bytes"],
        processes=start["processes"],
        network=start["network"],
        writable=tuple(start["writable_paths"]),
        layers=layers & set(start["layers"]),
    )


def serve_checks(
    connection: socket.socket, start: Mapping[str, Any], config: SandboxConfig, record: LayerRecord
) -> None:
    """Load verifiers, say what is active, and judge until the socket closes."""
    if config.layers:
        mount_private_files(config, record)
        with contextlib.suppress(OSError):
            adopt_orphans()
    verifiers, digests, fault = _import_verifiers(start["verifiers"])
    entered = tuple(record.active)
    programs = ProgramSandbox(
        config._replace(readable=list_python_paths()), entered, deadline_s=start["deadline_s"]
    )
    plain = ProgramSandbox(config, entered, deadline_s=start["deadline_s"])
    worker = _Worker(plain, verifiers, start)
    runs_programs = any(wants_program_sandbox(each) for each in verifiers.values())
    _probe(programs if runs_programs else plain, record)
    ready = {"digests": digests, "status": record.status, "fault": fault}
    connection.sendall(encode_frame({**ready, "runs_programs": runs_programs}))
    for checks in iter(lambda: read_frame(connection), None):
        for number, verdict, took_s in _judge(checks, verifiers, worker, programs):
            bounded = verdict.bound(start["output_bytes"])
            reply = {**bounded._asdict(), "number": number, "took_s": took_s}
            connection.sendall(encode_frame(reply))


def _judge(
    checks: list[Check],
    verifiers: Mapping[str, Verifier],
    worker: "_Worker",
    programs: ProgramSandbox,
) -> Iterator[tuple[int, Verdict, float]]:
    """Judge checks in their order."""
    for marked, group in groupby(checks, lambda each: wants_program_sandbox(verifiers[each[1]])):
        if not marked:
            yield from worker.judge(list(group))
            continue
        worker.stop()
        for number, name, job in group:
            began_s = time.perf_counter()
            verdict = run_verifier(verifiers[name], job, programs)
            took_s = time.perf_counter() - began_s
            programs.finish()
            yield number, verdict, took_s


def _import_verifiers(names: list[str]) -> tuple[dict[str, Verifier], dict[str, str], str]:
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


def _probe(sandbox: ProgramSandbox, record: LayerRecord) -> None:
    """Confine a process that ends at once, and note which layers held."""
    ours, theirs = os.pipe()

    parent = os.getpid()
    child = os.fork()
    if not child:
        try:
            held = sandbox.enter(parent, (theirs,))
            os.write(theirs, json.dumps((held.active, held.missing)).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    active, missing = json.loads(said) if said else ([], {"confinement": "a probe of it failed"})
    for name in active:
        record.add(name)
    record.missing.update(missing)


class _Worker:
    """The process that runs verifiers; starts anew after a death, or as many checks as asked."""

    def __init__(
        self, sandbox: ProgramSandbox, verifiers: Mapping[str, Verifier], start: Mapping[str, Any]
    ) -> None:
        self._sandbox, self._verifiers, self._start = sandbox, verifiers, start
        self._process, self._checks = 0, 0
        self._socket: socket.socket | None = None

    def judge(self, checks: list[Check]) -> Iterator[tuple[int, Verdict, float]]:
        """Judge checks in their order; what one died of costs the others nothing."""
        left = deque(checks)
        most = self._start["checks_per_process"]
        while left:
            if self._socket is None:
                self._begin()
            batch = list(islice(left, most - self._checks if most else None))
            self._send(batch)
            for number, _, _ in batch:
                began_s = time.perf_counter()
                verdict = self._receive()
                yield number, verdict, time.perf_counter() - began_s
                left.popleft()
                self._checks += 1
                if verdict.outcome in ("died", "timeout") or self._socket is None:
                    self.stop()
                    break
            if most and self._checks >= most:
                self.stop()

    def stop(self) -> None:
        """End the process and all it started."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._sandbox.finish()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = self._sandbox.start(lambda: self._serve(theirs), (theirs.fileno(),))
        theirs.close()
        self._socket, self._checks = ours, 0

    def _serve(self, connection: socket.socket) -> None:
        """Judge until the server is gone."""
        deadline_s = self._start["deadline_s"] + _ORPHAN_S
        for checks in iter(lambda: read_frame(connection), None):
            for _, name, job in checks:
                signal.setitimer(signal.ITIMER_REAL, deadline_s)
                limit_processor_time(deadline_s)
                verdict = run_verifier(self._verifiers[name], job)
                sent = verdict.bound(self._start["output_bytes"])._asdict()
                connection.sendall(encode_frame(sent))
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _send(self, checks: list[Check]) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):  # a worker that is gone is seen by who reads from it
            self._socket.settimeout(self._start["deadline_s"] + _ORPHAN_S)
            self._socket.sendall(encode_frame(checks))

    def _receive(self) -> Verdict:
        assert self._socket is not None
        until_s = time.monotonic() + self._start["deadline_s"] + _ORPHAN_S
        most = 6 * self._start["output_bytes"] + _OTHER_FIELDS  # as JSON escapes what it must
        try:
            message = read_frame(self._socket, most_bytes=most, until_s=until_s)
        except FrameTooLargeError as error:
            self.stop()
            return Verdict("output", 0.0, str(error))
        except TimeoutError:
            return Verdict("timeout", 0.0, "it gave no answer")
        except ValueError:
            message = {}
        return self._describe_end() if message is None else read_verdict(message)

    def _describe_end(self) -> Verdict:
        _, status = os.waitpid(self._process, 0)
        return describe_exit(os.waitstatus_to_exitcode(status))


def describe_exit(code: int) -> Verdict:
    """Say how a process ended that should have answered."""
    if code in (-signal.SIGXCPU, -signal.SIGALRM):
        return Verdict("timeout", 0.0, "it used up its time")
    if code < 0:
        return Verdict("died", 0.0, f"it was ended by {signal.Signals(-code).name}")
    return Verdict("died", 0.0, f"it ended with code {code}")
