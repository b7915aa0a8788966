"""`launch_local`: start the ranks of a job on this machine, let them speak, and end them together.

The port at which the ranks meet is bound here, before any of them starts, and its socket is handed
to rank 0: nobody can take it in between. Names of variables are torchrun's. SIGINT is held back
from a rank until it asks for it (`signals.use_default_sigint`): Python would print a traceback of
its own loading. No torch is loaded.
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
from types import FrameType
from typing import IO, Any

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.exit_reason import (
    EXIT_REASON_FD_VARIABLE,
    ExitReason,
    read_exit_reasons,
)
from meshwright.run.parallel.launch.exit_summary import (
    INTERRUPTED_MESSAGE,
    JobExit,
    RankProcess,
    summarize_exit,
)
from meshwright.run.parallel.launch.launcher_env import SLURM_TASK_VARIABLES
from meshwright.run.parallel.launch.store_server import LOOPBACK, listen_on_loopback
from meshwright.run.parallel.launch.world import STORE_FD_VARIABLE
from meshwright.spec.field_checks import check_integer, raise_problems

PROGRAM = (sys.executable, "-m", "meshwright", "train")
_MOST = 1024
_POLL_S = 0.05
_SETTLE_S = 1.0
"""How long the others may go on after the first bad end: often they fail by themselves, and say
why."""
_GRACE_S = 4.0
"""From asking a rank to end until it is killed: one that waits for a dead rank never hears."""
_OWN_WORDS = ("error: ", "  hint: ")


def launch_local(
    arguments: Sequence[str],
    nproc: int,
    *,
    port: int | None = None,
    program: Sequence[str] = PROGRAM,
) -> JobExit:
    """Start so many ranks of `mw train ARGUMENTS` here; return how they ended.

    Rank 0 has the terminal. What the others print goes to stderr, each line with its rank; an error
    that all ranks end with is printed by rank 0 alone. Signals are passed on. When a rank ends
    badly, the others end within some seconds. `port` is where ranks meet, and else a free one.
    """
    raise_problems(
        check_integer("--nproc-per-node", nproc, 1, _MOST),
        [] if port is None else check_integer("MASTER_PORT", port, 1, 65535),
    )
    listening, telling = os.pipe()
    os.set_blocking(listening, False)
    os.set_blocking(telling, False)  # a full pipe holds no rank up
    try:
        with _bound(port) as listener:
            ranks = _started([*program, *arguments], nproc, listener, telling)
        readers = [_reader(rank) for rank in ranks[1:]]
        with _passed_on(ranks) as passed:
            try:
                _watch(ranks)
            finally:
                _end(ranks, signal.SIGKILL)
        for thread in readers:
            thread.join(timeout=_SETTLE_S)
        ending = summarize_exit(ranks, _words(listening), passed)
        for line in ending.exit_messages:
            _say(line)
        return ending
    finally:
        os.close(listening)
        os.close(telling)


def _words(listening: int) -> list[ExitReason]:
    try:
        return read_exit_reasons(os.read(listening, 1 << 20))
    except BlockingIOError:  # nobody told anything
        return []


@contextmanager
def _bound(port: int | None) -> Iterator[socket.socket]:
    try:
        listener = listen_on_loopback(port or 0)
    except OSError as error:
        what = f"{port} cannot be had: {os.strerror(error.errno) if error.errno else error}"
        fix = "use another, or unset it, and a free one is found"
        raise InputError([Problem("MASTER_PORT", what, fix)]) from None
    with listener:
        yield listener


def make_rank_environment(
    number: int, nproc: int, port: int, environment: Mapping[str, str], cores: int
) -> dict[str, str]:
    """Return the environment of one rank."""
    kept = {name: value for name, value in environment.items() if name not in SLURM_TASK_VARIABLES}
    # Every rank would take all cores otherwise.
    kept.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    # torch prints stacks of C++ where the store of a dead rank is asked, which the alarm sums up.
    kept.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return {
        **kept,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }


def _started(
    command: Sequence[str], nproc: int, listener: socket.socket, telling: int
) -> list[RankProcess]:
    port, descriptor = listener.getsockname()[1], listener.fileno()
    ranks: list[RankProcess] = []
    try:
        for number in range(nproc):
            first = number == 0
            environment = make_rank_environment(number, nproc, port, os.environ, _cores())
            environment[EXIT_REASON_FD_VARIABLE] = str(telling)
            if first:
                environment[STORE_FD_VARIABLE] = str(descriptor)
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if first else subprocess.PIPE,
                stderr=None if first else subprocess.STDOUT,
                pass_fds=(telling, descriptor) if first else (telling,),
                # A Ctrl-C reaches this process alone, which passes it on once.
                process_group=0,
                preexec_fn=_prepare,  # noqa: PLW1509 - no thread runs here yet
            )
            ranks.append(RankProcess(number, process, time.monotonic()))
    except OSError as error:
        _end(ranks, signal.SIGKILL)
        what = f"rank {len(ranks)} cannot be started: {error.strerror or error}"
        raise InputError([Problem("--nproc-per-node", what, "start fewer")]) from None
    return ranks


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _prepare() -> None:
    """Hold SIGINT back, and ask Linux to end this process when its starter is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


def _reader(rank: RankProcess) -> threading.Thread:
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
                elif line and line != INTERRUPTED_MESSAGE:
                    _say(f"[rank {rank.rank}] {line}")

    thread = threading.Thread(target=copy, args=(stream,), daemon=True)
    thread.start()
    return thread


def _watch(ranks: Sequence[RankProcess]) -> None:
    """Wait for all to end; from the first bad end on, not for long."""
    failed_at: float | None = None
    asked = False
    while _alive(ranks):
        time.sleep(_POLL_S)
        now = time.monotonic()
        for rank in ranks:
            if rank.runtime_s is None and rank.process.poll() is not None:
                rank.runtime_s = now - rank.start_s
                rank.was_killed = asked and failed_at is not None
                if rank.exit_code and failed_at is None:
                    failed_at = now
        if failed_at is None or not _alive(ranks):
            continue
        if not asked and now > failed_at + _SETTLE_S:
            asked = True
            _end(ranks, signal.SIGTERM)
        elif now > failed_at + _SETTLE_S + _GRACE_S:
            _end(ranks, signal.SIGKILL)


def _alive(ranks: Sequence[RankProcess]) -> list[RankProcess]:
    return [rank for rank in ranks if rank.runtime_s is None]


def _end(ranks: Sequence[RankProcess], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


@contextmanager
def _passed_on(ranks: Sequence[RankProcess]) -> Iterator[list[int]]:
    """Pass every SIGINT and SIGTERM on to all ranks, which save and end together; list them."""
    passed: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed.append(number)
        _end(ranks, signal.Signals(number))

    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, pass_on)
    except ValueError:  # only a program's main thread may ask for signals
        pass
    try:
        yield passed
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
