"""When a run stops: on request, between two steps, and without Python's collector in the way."""

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Take the first SIGINT or SIGTERM as a request; a second one ends the program as usual."""
    asked = False
    before: dict[signal.Signals, Any] = {}

    def note(number: int, _: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(number, before[signal.Signals(number)])

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, note)
    except ValueError:  # only a program's main thread may ask for signals
        pass
    try:
        yield lambda: asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Leave Python's garbage to whoever calls `gc.collect`: it would stop steps at random."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
