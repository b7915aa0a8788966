"""Starts the job, hands signals on to it, and waits for it: as if nobody stood between.

Its input and output are the watcher's own, untouched. Signals are waited for rather than handled,
so that none is lost between two looks at the job. It should get each of them once: in front of a
terminal it shares the watcher's process group, where Ctrl-C reaches both from the kernel; elsewhere
it has a group of its own, and whatever is sent to the watcher's group is handed on. While the
watcher looks instead of waiting, the kernel gives signals to any thread that has not blocked them,
as those of numpy's BLAS have not: then a handler notes them, and nobody ends.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from meshwright.errors import InputError, MissingPart, Problem

HANDED_ON = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_FROM_KERNEL = 0x80
"""SI_KERNEL: the terminal sent it, to all of the group in front of it."""
_BY_KEY = frozenset({signal.SIGINT, signal.SIGQUIT})
"""What the terminal sends; a handler is not told who sent a signal."""
_PR_SET_PDEATHSIG = 1


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    started: Callable[[int], None],
    tick: Callable[[], None],
    tick_s: float,
) -> int:
    """Run a command to its end and return its exit code, 128 and the number if by a signal.

    `started` is told its process once; `tick` is called every `tick_s` or so.
    """
    if not hasattr(signal, "sigtimedwait"):
        raise MissingPart("this system cannot wait for signals", "watch on Linux")
    waited = HANDED_ON | {signal.SIGCHLD}
    # The handlers stay until nothing is blocked any more: a signal may come with the job's end.
    with _noted() as strays:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        try:
            shared = _before_terminal()
            job = _start(command, env, before, None if shared else 0)
            started(job.pid)
            while job.poll() is None:
                told = signal.sigtimedwait(waited, tick_s)
                if told is not None and _to_hand_on(told, shared=shared):
                    job.send_signal(told.si_signo)
                if told is None or told.si_signo != signal.SIGCHLD:
                    tick()
                while strays:
                    number = strays.pop(0)
                    if not (shared and number in _BY_KEY):
                        job.send_signal(number)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return job.returncode if job.returncode >= 0 else 128 - job.returncode


@contextmanager
def _noted() -> Iterator[list[int]]:
    """Note the signals that are not waited for; what is ignored stays so, in the job too."""
    strays: list[int] = []
    known = {number: signal.getsignal(number) for number in HANDED_ON}
    replaced = {
        number: handler
        for number, handler in known.items()
        if handler not in (signal.SIG_IGN, None)
    }
    for number in replaced:
        signal.signal(number, lambda got, _: strays.append(got))
    try:
        yield strays
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _to_hand_on(told: signal.struct_siginfo, *, shared: bool) -> bool:
    """Tell whether the job has not got a signal yet."""
    return told.si_signo in HANDED_ON and not (shared and told.si_code == _FROM_KERNEL)


def _before_terminal() -> bool:
    """Tell whether a terminal is there whose keys reach this process group."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _start(
    command: Sequence[str],
    env: Mapping[str, str],
    mask: set[int | signal.Signals],
    group: int | None,
) -> subprocess.Popen[bytes]:
    library = ctypes.CDLL(None)

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Should the watcher be killed, the job is asked to end rather than left alone.
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    try:
        # No other thread runs Python yet, so code between fork and exec is safe.
        return subprocess.Popen(
            command,
            env=dict(env),
            preexec_fn=in_child,  # noqa: PLW1509
            process_group=group,
        )
    except OSError as error:
        what = f"cannot be started: {error.strerror}"
        fix = "give the command of the job after --, as it is typed without mw watch"
        raise InputError([Problem(command[0], what, fix)]) from None
