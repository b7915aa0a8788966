"""Lets the watcher see where a process stands, also when its Python does not run any more.

Stacks are written by `faulthandler` from within a signal handler in C, which needs neither the
interpreter's lock nor a thread that is awake. The signal is one of the real-time ones that nothing
else in the process has taken. The flight recorder is dumped by a thread that sleeps in a read until
the watcher writes to its pipe.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

DUMP = b"f"
_FIRST_CHOICE = 6
"""Above SIGRTMIN, whose first ones the C library and others like to take."""


def find_free_signal() -> int | None:
    """Return a real-time signal without a handler; None where the system has none."""
    low, high = getattr(signal, "SIGRTMIN", None), getattr(signal, "SIGRTMAX", None)
    if low is None or high is None:
        return None
    for number in range(int(low) + _FIRST_CHOICE, int(high)):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    return None


def register_stack_signal(path: str) -> int | None:
    """Have the stacks of all threads added to a file at a signal; return its number."""
    number = find_free_signal()
    if number is None:
        return None
    file = open(path, "ab", buffering=0)  # noqa: SIM115, PTH123 - open as long as the process is
    os.chmod(path, 0o600)  # noqa: PTH101
    faulthandler.register(number, file=file, all_threads=True, chain=False)
    return number


def serve_dump_requests(pipe: str, dump: Callable[[], None]) -> None:
    """Start the thread that dumps the flight recorder when asked to."""
    os.mkfifo(pipe, 0o600)
    # Opened for both, so that opening does not wait and the end of a writer is no end of file.
    handle = os.open(pipe, os.O_RDWR)

    def answer() -> None:
        while True:
            if os.read(handle, 1) == DUMP:
                dump()

    threading.Thread(target=answer, name="meshwright-watch", daemon=True).start()


def dump_flight_recorder(torch: Any) -> bytes | None:
    """Return the flight recorder's dump, a pickle; None where this torch has none."""
    home = getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001 - torch has no public way
    distributed = torch.distributed
    nccl = "nccl" in str(distributed.get_backend()) if distributed.is_initialized() else False
    names = ("_dump_nccl_trace", "_dump_fr_trace") if nccl else ("_dump_fr_trace",)
    for name in names:
        dump = getattr(home, name, None)
        if dump is not None:
            return bytes(dump())
    return None
