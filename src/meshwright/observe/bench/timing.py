"""Samples of things that a program does from end to end: passes, each perhaps made ready before."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


Call = Callable[[], object]

QUEUED_S = 0.015
"""How long other work keeps the GPU busy while a group of calls is queued behind it."""

WARMUP_S = 0.3
"""How long products run before a loaded sample: the limit is one of mean power, over a tenth of a
second and more."""

GROUPS, MIN_CALLS, MAX_CALLS = 7, 1, 50

LAST_LEVEL_CACHE_BYTES = 256 << 20
"""No device of the catalog has a last cache as large."""


class TimedWork(NamedTuple):
    """What a case asks for, ready to run."""

    calls: tuple[Call, ...]
    """Does it once, each on inputs of its own; taken in turn."""
    flops: float | None = None
    bytes: float | None = None
    sample: Callable[[], float] | None = None
    """Takes one sample by itself and returns its seconds, where neither timer's way would do."""


class TimingSamples(NamedTuple):
    """Samples of one call, in seconds."""

    samples_s: tuple[float, ...]
    host_s: float | None = None

    @property
    def median_s(self) -> float:
        """The median."""
        return median(self.samples_s)

    def quantile(self, share: float) -> float:
        """Return the sample below which a share of all lies."""
        ordered = sorted(self.samples_s)
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def count_input_sets(size_bytes: float) -> int:
    """Return how many sets of inputs of a size are larger than the last cache, at most 8."""
    return max(1, min(8, -(-LAST_LEVEL_CACHE_BYTES // max(1, round(size_bytes)))))


class HostTimer:
    """Times calls that are done when they return."""

    def __init__(self, budget_s: float = 0.3) -> None:
        self.budget_s = budget_s

    def time(self, work: TimedWork) -> TimingSamples:
        """Call until the budget is spent, at least three times."""
        samples = list[float]()
        take = work.sample or _in_turn(work.calls)
        take()
        end = time.perf_counter() + self.budget_s
        while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 1000):
            samples.append(take())
        return TimingSamples(tuple(samples))


def _in_turn(calls: Sequence[Call]) -> Callable[[], float]:
    """Return what times one call after another, again and again."""
    turns = cycle(calls)

    def take() -> float:
        call = next(turns)
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    return take


class GpuTimer:
    """Times calls on the device alone, at ease or under load."""

    def __init__(
        self, device: "torch.device", *, under_load: bool = False, warmup_s: float = WARMUP_S
    ) -> None:
        import torch

        self.device, self.under_load, self.warmup_s = device, under_load, warmup_s
        if under_load:
            first, second = (
                torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2)
            )
            out = torch.empty_like(first)
            self._before: Call = lambda: torch.mm(first, second, out=out)
        else:
            here = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
            there = torch.empty_like(here)
            self._before = lambda: there.copy_(here)
        self._before()
        once_s = self._elapsed_s([self._before] * 5)
        self._times = max(2, round(QUEUED_S / once_s))

    def warm_up(self, seconds: float) -> None:
        """Keep the device busy for a while."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._elapsed_s([self._before] * self._times)

    def time(self, work: TimedWork) -> TimingSamples:
        """Take samples of several calls each, queued behind other work."""
        import torch

        if work.sample is not None:
            work.sample()
            return TimingSamples(tuple(work.sample() for _ in range(GROUPS)))
        calls = work.calls
        for call in calls:
            call()
        torch.cuda.synchronize(self.device)
        begun = time.perf_counter()
        for call in calls:
            call()
        host_s = (time.perf_counter() - begun) / len(calls)
        once_s = self._elapsed_s(list(calls)) / len(calls)
        # As many as are launched while the other work runs, and no more than make two milliseconds.
        number = round(min(MAX_CALLS, 0.6 * QUEUED_S / host_s, max(1.0, 2e-3 / once_s)))
        number = max(MIN_CALLS, number)
        samples = []
        if self.under_load:
            # Made ready while the device rested: it has to be brought back to its limit.
            self.warm_up(self.warmup_s)
        for group in range(GROUPS):
            for _ in range(self._times):
                self._before()
            turn = [calls[(group * number + one) % len(calls)] for one in range(number)]
            samples.append(self._elapsed_s(turn) / number)
        return TimingSamples(tuple(samples), host_s)

    @staticmethod
    def _elapsed_s(calls: Sequence[Call]) -> float:
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


BUDGET_S = 0.5
"""How long one case is repeated."""


def time_passes(
    run: Callable[[], object],
    before: Callable[[], object] | None = None,
    *,
    least: int = 3,
    most: int = 50,
) -> TimingSamples:
    """Run passes until the budget is spent; what `before` does is not timed."""
    samples = list[float]()
    end = time.perf_counter() + BUDGET_S
    while len(samples) < least or (time.perf_counter() < end and len(samples) < most):
        if before is not None:
            before()
        begun = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begun)
    return TimingSamples(tuple(samples))
