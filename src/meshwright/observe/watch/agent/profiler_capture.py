"""Takes a profile of a few whole steps with torch's own profiler, and says what that took."""
# ruff: noqa: TID252 - loaded under another name in the job, see the package

import os
import time
from typing import Any

from .shared_pages import CaptureCommand


class ProfilerCapture:
    """One capture while it is taken."""

    def __init__(self, torch: Any, request: CaptureCommand, *, shapes: bool, stack: bool) -> None:
        self.request, self._torch, self._left = request, torch, request.num_steps
        self.overhead_ns = 0
        """Time spent on starting, stopping and writing."""
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CPU]
        # Asking for a device that the process does not use would make it use it.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            kinds.append(activity.CUDA)
        xpu = getattr(torch, "xpu", None)
        if xpu is not None and xpu.is_available() and xpu.is_initialized():
            kinds.append(activity.XPU)
        self._profiler = torch.profiler.profile(
            activities=kinds, record_shapes=shapes, with_stack=stack
        )
        self._mark: Any = None
        self._running = False

    def start(self, step: int) -> None:
        """Begin with the step of this number."""
        began = time.monotonic_ns()
        self._profiler.start()
        self._running = True
        self._open(step)
        self.overhead_ns += time.monotonic_ns() - began

    def end_step(self, ended: int) -> bool:
        """Close the step that ended; False where another one belongs to the capture."""
        self._close()
        self._left -= 1
        if self._left > 0:
            self._open(ended + 1)
            return False
        return True

    def finish(self, path: str) -> None:
        """Stop and write the trace; it has its name only when it is whole."""
        began = time.monotonic_ns()
        self._stop()
        part = f"{path}.part.json"
        try:
            self._profiler.export_chrome_trace(part)
            os.chmod(part, 0o600)  # noqa: PTH101
            os.replace(part, path)  # noqa: PTH105
        except BaseException:
            for left in (part, f"{part}.tmp"):  # Kineto writes under the second name first
                if os.path.exists(left):  # noqa: PTH110
                    os.unlink(left)  # noqa: PTH108
            raise
        self.overhead_ns += time.monotonic_ns() - began

    def abandon(self) -> None:
        """Stop without a trace."""
        self._close()
        self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._profiler.stop()

    def _open(self, step: int) -> None:
        # The name that analysers know a step by.
        self._mark = self._torch.profiler.record_function(f"ProfilerStep#{step}")
        self._mark.__enter__()

    def _close(self) -> None:
        if self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(None, None, None)
