"""A command line as it may be shown: what looks like a secret is left out."""

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.observe.watch.watch_folder import WatchFolder
from meshwright.redaction import REDACTED, redact_secrets

_CHECKED = "x"

_KEY = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|glpat-|xox[abp]-|AKIA)[\w-]{12,}")
"""Keys that give themselves away by how they begin."""


def redact_command(words: Sequence[str]) -> str:
    """Return the command with the values of `--token`, `api_key=…` and logins left out."""
    parts: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            parts.append(REDACTED)
            hide = False
            continue
        secret = _is_secret(name)
        hide = secret and not equals and word.startswith("-")
        said = (
            f"{name}={REDACTED}" if secret and equals else _KEY.sub(REDACTED, redact_secrets(word))
        )
        parts.append(said if REDACTED in said else shlex.quote(said))
    return " ".join(parts)


def _is_secret(name: str) -> bool:
    return bool(redact_secrets(_CHECKED, name.lstrip("-")) == REDACTED)


INJECT_FOLDER = Path(__file__).with_name("agent") / "inject"
"""The folder that goes first on PYTHONPATH."""

CUPTI_TEARDOWN_VAR = "TEARDOWN_CUPTI"
"""Has the profiler let go of the driver after every capture. Otherwise the driver goes on reporting
every launch: after one capture an H200 took 20 to 25 % longer for steps that the host sets the pace
of (2026-11-16, torch 2.11), and nothing longer for steps that fill the device. Graphs
do not stand it before CUDA 12.6: PyTorch unsets it for those of its compiler, the agent for others.
"""

WATCH_TEARDOWN_VAR = "MESHWRIGHT_WATCH_TEARDOWN"
"""Says that the watch has set it, not the job."""


def build_environment(base: Mapping[str, str], folder: WatchFolder) -> dict[str, str]:
    """Return the environment of the job; what is set there already stays as it is."""
    path = base.get("PYTHONPATH", "")
    ours = {} if CUPTI_TEARDOWN_VAR in base else {CUPTI_TEARDOWN_VAR: "1", WATCH_TEARDOWN_VAR: "1"}
    return (
        dict(base)
        | ours
        | {
            "MESHWRIGHT_WATCH": str(folder.path),
            "PYTHONPATH": f"{INJECT_FOLDER}{os.pathsep}{path}" if path else str(INJECT_FOLDER),
        }
    )


FORWARDED_SIGNALS = frozenset(
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


def run_job(
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
        raise MissingDependency("this system cannot wait for signals", "watch on Linux")
    waited = FORWARDED_SIGNALS | {signal.SIGCHLD}
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
    known = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
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
    return told.si_signo in FORWARDED_SIGNALS and not (shared and told.si_code == _FROM_KERNEL)


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
