"""Ends everything that a process started, also what left its group and session."""

import contextlib
import os
import signal
import time
from pathlib import Path

from meshwright.run.posttrain.rollout.verifiers.sandbox.linux_calls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    prctl,
)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that none escapes."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends; exit where it has ended already."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_descendants(*known: int, within_s: float) -> bool:
    """Kill and reap all children and adopted orphans; return whether none is left.

    Children that are `known` need no look at `/proc`, which may show another PID namespace.
    """
    until_s = time.monotonic() + within_s
    for child in known:
        _kill(child)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            if os.getpid() == 1:
                _kill(-1)  # everything in the PID namespace but this process
            else:
                for child in _list_children():
                    _kill(child)
            if time.monotonic() > until_s:
                return False
            time.sleep(0.0005)
            continue
        return True


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _list_children() -> list[int]:
    own = os.getpid()
    with contextlib.suppress(OSError):
        listed = Path(f"/proc/self/task/{own}/children").read_text(encoding="ascii")
        return [int(each) for each in listed.split()]
    children = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                if int(fields.rpartition(")")[2].split()[1]) == own:
                    children.append(int(entry.name))
    return children
