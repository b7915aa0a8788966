"""Ends a capture whose step does not end: a profiler left on gathers memory without bound.

Only the thread that began a profile may end it. So a timer has Python itself call the main thread
between two of its instructions, by the way that signal handlers of Python are called.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any


def is_main_thread() -> bool:
    """Tell whether this is the thread that can be called."""
    return threading.current_thread() is threading.main_thread()


class MainThreadTimer:
    """Rings once in the main thread, unless it is cleared before."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: threading.Timer | None = None
        self._kept: Any = None

    def set(self, after_s: float) -> None:
        """Ring so many seconds from now."""
        self.clear()
        timer = threading.Timer(after_s, lambda: self._call(timer))
        timer.daemon = True
        self._timer = timer
        timer.start()

    def clear(self) -> None:
        """Do not ring."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _call(self, timer: threading.Timer) -> None:
        def pending(_: Any) -> int:
            if self._timer is timer:
                self._ring()
            return 0

        # The interpreter holds the bare address: the object must outlive the call.
        self._kept = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(pending)
        ctypes.pythonapi.Py_AddPendingCall(self._kept, None)
