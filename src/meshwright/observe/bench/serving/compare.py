"""Two results side by side: by how much they differ, and whether that is more than noise.

Noise is judged by resampling. Requests that ran next to each other shared a queue, so stretches of
neighbouring requests are drawn rather than single ones (the circular block bootstrap of Politis and
Romano 1992). What varies from one start of a server to the next is in no single run.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.observe.bench.serving.figures import METRICS, answered, rates_over_time
from meshwright.observe.bench.serving.result import Result, Run
from meshwright.observe.bench.serving.served import Served

DRAWS = 400
LEVEL = 0.99
"""Of intervals; with a dozen lines 95 % would cry wolf every other time."""
SHARES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
LEAST_BEYOND = 2
"""A percentile is compared where at least so many values lie beyond it: else it is one request."""
FEW = 100
"""With fewer requests, runs of the same thing were called different in up to 8 % of the lines."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two runs."""

    name: str
    unit: str
    first: float
    second: float
    change: float
    """Second over first, less one."""
    low: float
    """99 of 100 resamplings found a change between this and `high`."""
    high: float
    better_is: str
    """`less` or `more`."""

    @property
    def beyond_noise(self) -> bool:
        """Whether no change at all can be ruled out."""
        return self.low > 0 or self.high < 0

    @property
    def better(self) -> bool:
        """Whether the second is the better one."""
        return (self.change < 0) == (self.better_is == "less")


class Compared(NamedTuple):
    """Two runs of the same load."""

    name: str
    lines: tuple[Difference, ...]


def pairs_of(first: Result, second: Result) -> list[tuple[Run, Run]]:
    """Return runs of the same load; where both have just one, these."""
    if len(first.runs) == len(second.runs) == 1:
        return [(first.runs[0], second.runs[0])]
    known = {run.name: run for run in second.runs}
    return [(run, known[run.name]) for run in first.runs if run.name in known]


def compare(first: Run, second: Run, seed: int = 0) -> Compared:
    """Compare the latencies and throughputs of two runs."""
    name = first.name if first.name == second.name else f"{first.name} and {second.name}"
    rng = np.random.Generator(np.random.PCG64(seed))
    sides = [_drawn(run, rng) for run in (first, second)]
    lines = []
    for key in sides[0]:
        if key in sides[1]:
            (a, many_a), (b, many_b) = sides[0][key], sides[1][key]
            if a > 0 and b > 0:
                lines.append(_difference(key, (a, b), (many_a, many_b)))
    return Compared(name, tuple(lines))


class _Key(NamedTuple):
    name: str
    unit: str
    better_is: str


def _difference(key: _Key, pair: tuple[float, float], drawn: tuple[Floats, Floats]) -> Difference:
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = drawn[1] / drawn[0] - 1
    tail = (1 - LEVEL) / 2 * 100
    low, high = np.percentile(changes[np.isfinite(changes)], [tail, 100 - tail])
    return Difference(
        name=key.name,
        unit=key.unit,
        first=pair[0],
        second=pair[1],
        change=pair[1] / pair[0] - 1,
        low=float(low),
        high=float(high),
        better_is=key.better_is,
    )


_Found = tuple[float, Floats]


def _drawn(run: Run, rng: np.random.Generator) -> dict[_Key, _Found]:
    """Return every figure of a run with what resampling makes of it."""
    served = sorted(answered(run), key=lambda one: one.sent_s)
    found = dict[_Key, _Found]()
    if not served:
        return found
    weights = _blocks(len(served), rng)
    for metric, words in METRICS.items():
        values, owners = _values(served, metric)
        if not len(values):
            continue
        for name, at in _latencies(values, owners):
            many = np.array([at(draw) for draw in weights])
            whole = at(np.ones(len(served), dtype=np.int64))
            found[_Key(f"{words}, {name}", "s", "less")] = (whole, many)
    rates = np.array([rate for _, rate in rates_over_time(run)])
    if len(rates):
        many = _blocks(len(rates), rng) @ rates / len(rates)
        found[_Key("output tokens", "tokens/s", "more")] = (float(rates.mean()), many)
    return found


def _blocks(count: int, rng: np.random.Generator) -> Counts:
    """Return how often each of `count` neighbours is drawn, one row for each resampling."""
    length = max(1, round(math.sqrt(count)))
    blocks = -(-count // length)
    starts = rng.integers(0, count, (DRAWS, blocks))
    members = (starts[:, :, None] + np.arange(length)) % count
    members = members.reshape(DRAWS, -1)[:, :count]
    return np.array([np.bincount(row, minlength=count) for row in members])


def _values(served: Sequence[Served], metric: str) -> tuple[Floats, Counts]:
    """Return a latency's values in rising order, and whose each is."""
    values, owners = list[float](), list[int]()
    for owner, one in enumerate(served):
        value = getattr(one, f"{metric}_s") if metric != "itl" else None
        mine = one.gaps_s if metric == "itl" else [] if value is None else [value]
        values += mine
        owners += [owner] * len(mine)
    order = np.argsort(values, kind="stable")
    return np.array(values)[order], np.array(owners, dtype=np.int64)[order]


def _latencies(values: Floats, owners: Counts) -> list[tuple[str, Callable[[Counts], float]]]:
    """Return the mean and percentiles as functions of how often each request counts."""

    def mean(weights: Counts) -> float:
        each = weights[owners]
        return float(each @ values / max(1, each.sum()))

    def percentile(share: float) -> Callable[[Counts], float]:
        def at(weights: Counts) -> float:
            passed = np.cumsum(weights[owners])
            return float(values[np.searchsorted(passed, share / 100 * passed[-1])])

        return at

    shares = {
        name: share
        for name, share in SHARES.items()
        if len(values) * (1 - share / 100) >= LEAST_BEYOND
    }
    return [("mean", mean), *((name, percentile(share)) for name, share in shares.items())]
