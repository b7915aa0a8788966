"""`run`: start the ranks of a job on this machine, let them speak, and end them together.

The port at which the ranks meet is bound here, before any of them starts, and its socket is handed
to rank 0: nobody can take it in between. Names of variables are torchrun's. No torch is loaded.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.agreement import ranked
from meshwright.run.parallel.launch.environment import LISTENER
from meshwright.run.parallel.launch.places import OUTER
from meshwright.spec.bounds import require, whole

PROGRAM = (sys.executable, "-m", "meshwright", "train")
_MOST = 1024
_LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
_SETTLE_S = 1.0
"""How long the others may go on after the first bad end: often they fail by themselves, and say
why."""
_GRACE_S = 4.0
"""From asking a rank to end until it is killed: one that waits for a dead rank never hears."""
_OWN_WORDS = ("error: ", "  hint: ")
_SPOKEN = {1, 2, 3, 70, 130}
"""Exit codes of programs that have said why they end."""


@dataclass
class _Rank:
    """One process, and how it ended."""

    number: int
    process: subprocess.Popen[bytes]
    began: float
    ended_s: float | None = None
    was_ended: bool = False
    """Whether it ended because others had failed."""
    errors: list[str] = field(default_factory=list)
    """What it said went wrong, in the words of our own messages."""

    @property
    def code(self) -> int:
        """Its exit code as a shell counts, with 128 added to a signal's number."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    @property
    def fate(self) -> str:
        """How it ended, in words."""
        code, after = self.process.returncode, f"after {self.ended_s or 0:.1f} s"
        if code >= 0:
            return f"ended with exit code {code} {after}"
        return f"was killed by {signal.Signals(-code).name} {after}"


def run(
    arguments: Sequence[str],
    nproc: int,
    *,
    port: int | None = None,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Start so many ranks of `mw train ARGUMENTS` here; return the worst of their exit codes.

    Rank 0 has the terminal. What the others print goes to stderr, each line with its rank; an error
    that all ranks end with is printed by rank 0 alone. Signals are passed on. When a rank ends
    badly, the others end within some seconds.
    """
    require(
        whole("--nproc", nproc, 1, _MOST),
        [] if port is None else whole("--port", port, 1, 65535),
    )
    with _bound(port) as listener:
        ranks = _started([*program, *arguments], nproc, listener)
    readers = [_reader(rank) for rank in ranks[1:]]
    with _passed_on(ranks):
        try:
            _watch(ranks)
        finally:
            _end(ranks, signal.SIGKILL)
    for thread in readers:
        thread.join(timeout=_SETTLE_S)
    return _closing(ranks)


@contextmanager
def _bound(port: int | None) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server((_LOOPBACK, port or 0), backlog=2048)
    except OSError as error:
        what = f"{port} cannot be had: {error.strerror or error}"
        fix = "leave it out, and a free one is found"
        raise InputError([Problem("--port", what, fix)]) from None
    with listener:
        yield listener


def variables(
    number: int, nproc: int, port: int, environment: Mapping[str, str], cores: int
) -> dict[str, str]:
    """Return the environment of one rank."""
    kept = {name: value for name, value in environment.items() if name not in OUTER}
    # Every rank would take all cores otherwise.
    kept.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    return {
        **kept,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
    }


def _started(command: Sequence[str], nproc: int, listener: socket.socket) -> list[_Rank]:
    port, descriptor = listener.getsockname()[1], listener.fileno()
    ranks: list[_Rank] = []
    try:
        for number in range(nproc):
            first = number == 0
            environment = variables(number, nproc, port, os.environ, _cores())
            if first:
                environment[LISTENER] = str(descriptor)
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if first else subprocess.PIPE,
                stderr=None if first else subprocess.STDOUT,
                pass_fds=(descriptor,) if first else (),
                # A Ctrl-C reaches this process alone, which passes it on once.
                process_group=0,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no thread runs here yet
            )
            ranks.append(_Rank(number, process, time.monotonic()))
    except OSError as error:
        _end(ranks, signal.SIGKILL)
        what = f"rank {len(ranks)} cannot be started: {error.strerror or error}"
        raise InputError([Problem("--nproc", what, "start fewer")]) from None
    return ranks


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _end_with_parent() -> None:
    """Ask Linux to end this process when its starter is gone, however it went."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


def _reader(rank: _Rank) -> threading.Thread:
    """Copy what a rank prints, line by line, to stderr; keep back its own errors."""
    stream = rank.process.stdout
    assert stream is not None, "every rank but the first has a pipe"

    def copy(stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                # A bar that is drawn over itself leaves only what it was last.
                line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
                if line.startswith(_OWN_WORDS):
                    rank.errors.append(line)
                elif line:
                    _say(f"[rank {rank.number}] {line}")

    thread = threading.Thread(target=copy, args=(stream,), daemon=True)
    thread.start()
    return thread


def _watch(ranks: Sequence[_Rank]) -> None:
    """Wait for all to end; from the first bad end on, not for long."""
    failed_at: float | None = None
    asked = False
    while _alive(ranks):
        time.sleep(_POLL_S)
        now = time.monotonic()
        for rank in ranks:
            if rank.ended_s is None and rank.process.poll() is not None:
                rank.ended_s = now - rank.began
                rank.was_ended = asked and failed_at is not None
                if rank.code and failed_at is None:
                    failed_at = now
        if failed_at is None or not _alive(ranks):
            continue
        if not asked and now > failed_at + _SETTLE_S:
            asked = True
            _end(ranks, signal.SIGTERM)
        elif now > failed_at + _SETTLE_S + _GRACE_S:
            _end(ranks, signal.SIGKILL)


def _alive(ranks: Sequence[_Rank]) -> list[_Rank]:
    return [rank for rank in ranks if rank.ended_s is None]


def _end(ranks: Sequence[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


@contextmanager
def _passed_on(ranks: Sequence[_Rank]) -> Iterator[None]:
    """Pass every SIGINT and SIGTERM on to all ranks, which save and end together."""

    def pass_on(number: int, _: FrameType | None) -> None:
        _end(ranks, signal.Signals(number))

    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, pass_on)
    except ValueError:  # only a program's main thread may ask for signals
        pass
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _closing(ranks: Sequence[_Rank]) -> int:
    """Say who ended how, and return the worst exit code."""
    codes = {rank.code for rank in ranks}
    if codes == {0}:
        return 0
    if len(codes) == 1 and codes < _SPOKEN:  # all of one mind, and rank 0 has said why
        return codes.pop()
    said: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.errors:
            said.setdefault("\n".join(rank.errors), []).append(rank.number)
    for text, numbers in said.items():
        for line in text.splitlines():
            _say(f"[{ranked(numbers)}] {line}")
    own = [rank for rank in ranks if rank.code and not rank.was_ended]
    first = min(own, key=lambda rank: rank.ended_s or 0.0)
    others = [rank.number for rank in ranks if rank.was_ended and rank.code]
    _say(f"error: rank {first.number} {first.fate}" + _ended(others))
    return max(rank.code for rank in own)


def _ended(others: list[int]) -> str:
    if not others:
        return ""
    return f"; {ranked(others)} {'was' if len(others) == 1 else 'were'} ended for it"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
