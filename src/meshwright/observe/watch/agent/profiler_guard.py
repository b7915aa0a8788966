"""Gives way to the job's own use of torch's profiler, of which there can be only one at a time."""

import os
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

_TEARDOWN, _OURS = "TEARDOWN_CUPTI", "MESHWRIGHT_WATCH_TEARDOWN"
_FIRST_TO_STAND_IT = (12, 6)


def keep_cupti_for_graphs(torch: Any) -> None:
    """Have the profiler keep the driver from the first CUDA graph on, where we asked it not to.

    Below CUDA 12.6 a driver that is let go and taken again crashes under graphs. PyTorch minds that
    for graphs of its compiler (`torch/profiler/profiler.py`), not for those that a job makes.
    """
    graph = getattr(getattr(torch.cuda, "graphs", None), "CUDAGraph", None)
    inner = getattr(graph, "capture_begin", None)
    cuda = re.findall(r"\d+", str(torch.version.cuda))
    stands_it = not cuda or tuple(map(int, cuda[:2])) >= _FIRST_TO_STAND_IT
    if graph is None or inner is None or stands_it or _OURS not in os.environ:
        return

    @wraps(inner)
    def capture_begin(self: Any, *args: Any, **words: Any) -> Any:
        os.environ[_TEARDOWN] = "0"
        return inner(self, *args, **words)

    graph.capture_begin = capture_begin


class ProfilerGuard:
    """Knows whether the job profiles itself; told before it begins, we end our own capture."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self.jobs = False
        """Whether the job profiles itself now."""
        self.ours = False
        """Set while we call the profiler ourselves."""
        self._give_way = give_way

    def install_hooks(self, torch: Any) -> None:
        """Hear of every use: `torch.profiler` and `torch.autograd.profiler` go through these."""
        home = torch.autograd.profiler
        for name, begins in (
            ("_prepare_profiler", True),
            ("_enable_profiler", True),
            ("_disable_profiler", False),
        ):
            inner = getattr(home, name, None)
            if inner is not None:
                setattr(home, name, self._heard(inner, begins=begins))

    def _heard(self, inner: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            if not self.ours:
                if begins and not self.jobs:
                    self._give_way()
                self.jobs = begins
            return inner(*args, **words)

        return call
