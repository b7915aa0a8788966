"""Samples of things that a program does from end to end: passes, each perhaps made ready before."""

import time
from collections.abc import Callable

from meshwright.observe.bench.timing import Timed

BUDGET_S = 0.5
"""How long one case is repeated."""


def timed_passes(
    run: Callable[[], object],
    before: Callable[[], object] | None = None,
    *,
    least: int = 3,
    most: int = 50,
) -> Timed:
    """Run passes until the budget is spent; what `before` does is not timed."""
    samples = list[float]()
    end = time.perf_counter() + BUDGET_S
    while len(samples) < least or (time.perf_counter() < end and len(samples) < most):
        if before is not None:
            before()
        begun = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begun)
    return Timed(tuple(samples))
