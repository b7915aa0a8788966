"""When a run stops: on request, between two steps, and without Python's collector in the way."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

StopRequest = Callable[[], str | None]
"""Returns the name of the signal that asked a run to stop, None while none did."""


@contextmanager
def use_default_sigint() -> Iterator[None]:
    """While a program loads, let SIGINT end it at once and without a traceback.

    A rank's starter may hold SIGINT back until here; see `launch/local`.
    """

    def end(_: int, __: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, b"interrupted\n")
        os._exit(128 + signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield  # only a program's main thread may ask for signals
        return
    before = signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Take the first SIGINT or SIGTERM as a request; a second of either ends the program."""
    asked: str | None = None
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    def note(number: int, _: FrameType | None) -> None:
        nonlocal asked
        asked = signal.Signals(number).name
        restore()
        text = f"\nnote: {asked}: saves after this step and ends; once more ends at once\n"
        # Not through `sys.stderr`, which the signal may have interrupted in the midst of a line.
        with suppress(OSError):
            os.write(2, text.encode())

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, note)
    except ValueError:  # only a program's main thread may ask for signals
        pass
    try:
        yield lambda: asked
    finally:
        restore()


@contextmanager
def disable_gc() -> Iterator[None]:
    """Leave Python's garbage to whoever calls `gc.collect`: it would stop steps at random."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
