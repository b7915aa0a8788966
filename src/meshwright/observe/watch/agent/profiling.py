"""Gives way to the job's own use of torch's profiler, of which there can be only one at a time."""

from collections.abc import Callable
from typing import Any


class Turn:
    """Knows whether the job profiles itself; told before it begins, we end our own capture."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self.jobs = False
        """Whether the job profiles itself now."""
        self.ours = False
        """Set while we call the profiler ourselves."""
        self._give_way = give_way

    def listen(self, torch: Any) -> None:
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
