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

from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.serving_metrics import (
    NUM_INTERVALS,
    compute_serving_metrics,
    compute_throughput_between,
    find_steady_window,
    select_completed_requests,
)
from meshwright.observe.bench.serving.serving_result import ServingBenchResult, ServingBenchRun
from meshwright.predict.serving.sim.latency import LATENCIES

NUM_BOOTSTRAP_DRAWS = 400
CONFIDENCE_LEVEL = 0.99
"""Of intervals; with a dozen lines 95 % would cry wolf every other time."""
SHARES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
MIN_SAMPLES_BEYOND = 2
"""A percentile is compared where at least so many values lie beyond it: else it is one request."""
MIN_REQUESTS = 50
"""Fewer requests make too few stretches to draw from."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class MetricDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two runs."""

    name: str
    unit: str
    first: float
    second: float
    change: float
    """Second over first, less one."""
    low: float | None
    """99 of 100 resamplings found a change between this and `high`; None where a run has but one
    value, which says nothing of noise."""
    high: float | None
    better_is: str
    """`less` or `more`."""

    @property
    def is_significant(self) -> bool:
        """Whether no change at all can be ruled out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def is_improvement(self) -> bool:
        """Whether the second is the better one."""
        return (self.change < 0) == (self.better_is == "less")


class RunComparison(NamedTuple):
    """Two runs of the same load."""

    name: str
    differences: tuple[MetricDifference, ...]


def pair_runs(
    first: ServingBenchResult, second: ServingBenchResult
) -> list[tuple[ServingBenchRun, ServingBenchRun]]:
    """Return runs of the same load; where both have just one, these."""
    if len(first.runs) == len(second.runs) == 1:
        return [(first.runs[0], second.runs[0])]
    known = {run.name: run for run in second.runs}
    return [(run, known[run.name]) for run in first.runs if run.name in known]


def compare_bench_runs(first: ServingBenchRun, second: ServingBenchRun) -> RunComparison:
    """Compare the latencies and throughputs of two runs.

    Where both asked the same requests, the same ones are drawn on both sides, so that what a long
    prompt costs either of them is no noise.
    """
    name = first.name if first.name == second.name else f"{first.name} and {second.name}"
    one = _drawn(first, seed=0)
    other = _drawn(second, seed=0 if _asked(first) == _asked(second) else 1)
    return RunComparison(
        name,
        tuple(
            _difference(key, one[key], other[key])
            for key in one
            if key in other and one[key].value > 0 and other[key].value > 0
        ),
    )


def _asked(run: ServingBenchRun) -> list[tuple[int, int, int]]:
    return [
        (one.index, one.requested_prompt_tokens, one.requested_output_tokens)
        for one in select_completed_requests(run)
    ]


class _Key(NamedTuple):
    name: str
    unit: str
    better_is: str


class _BootstrapSamples(NamedTuple):
    """A figure, and what resampling makes of it; None where a run has but one value of it."""

    value: float
    many: Floats | None


def _difference(key: _Key, one: _BootstrapSamples, other: _BootstrapSamples) -> MetricDifference:
    low = high = None
    if one.many is not None and other.many is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            changes = other.many / one.many - 1
        tail = (1 - CONFIDENCE_LEVEL) / 2 * 100
        low, high = map(float, np.percentile(changes[np.isfinite(changes)], [tail, 100 - tail]))
    return MetricDifference(
        name=key.name,
        unit=key.unit,
        first=one.value,
        second=other.value,
        change=other.value / one.value - 1,
        low=low,
        high=high,
        better_is=key.better_is,
    )


def _drawn(run: ServingBenchRun, seed: int) -> dict[_Key, _BootstrapSamples]:
    """Return every figure of a run with what resampling makes of it."""
    served = sorted(select_completed_requests(run), key=lambda one: one.index)
    found = dict[_Key, _BootstrapSamples]()
    if not served:
        return found
    weights = _blocks(len(served), np.random.Generator(np.random.PCG64(seed)))
    once = np.ones(len(served), dtype=np.int64)
    for metric in LATENCIES:
        values, owners = _values(served, metric)
        if len(values):
            for name, at in _latencies(values, owners):
                many = np.array([at(draw) for draw in weights])
                found[_Key(f"{metric} {name}", "s", "less")] = _BootstrapSamples(at(once), many)
    whole = compute_serving_metrics(run)
    tokens = _Key("output tokens", "tokens/s", "more")
    found[tokens] = _BootstrapSamples(whole.output_tokens_per_s, None)
    if (window := find_steady_window(run)) is not None:
        rates = np.array(
            [rate for _, rate in compute_throughput_between(run, *window, NUM_INTERVALS)]
        )
        rng = np.random.Generator(np.random.PCG64(seed))
        many = _blocks(len(rates), rng) @ rates / len(rates)
        key = _Key("output tokens under load", "tokens/s", "more")
        found[key] = _BootstrapSamples(float(rates.mean()), many)
    return found


def _blocks(count: int, rng: np.random.Generator) -> Counts:
    """Return how often each of `count` neighbours is drawn, one row for each resampling."""
    length = max(1, round(math.sqrt(count)))
    blocks = -(-count // length)
    starts = rng.integers(0, count, (NUM_BOOTSTRAP_DRAWS, blocks))
    members = (starts[:, :, None] + np.arange(length)) % count
    members = members.reshape(NUM_BOOTSTRAP_DRAWS, -1)[:, :count]
    return np.array([np.bincount(row, minlength=count) for row in members])


def _values(served: Sequence[RequestResult], metric: str) -> tuple[Floats, Counts]:
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
            # Between two neighbours, as the figures of one run have it (`compute_latency_stats`).
            passed = np.cumsum(weights[owners])
            place = share / 100 * max(0, passed[-1] - 1)
            around = np.searchsorted(passed, [math.floor(place), math.ceil(place)], side="right")
            low, high = values[np.minimum(around, len(values) - 1)]
            return float(low + (place - math.floor(place)) * (high - low))

        return at

    shares = {
        name: share
        for name, share in SHARES.items()
        if len(values) * (1 - share / 100) >= MIN_SAMPLES_BEYOND
    }
    return [("mean", mean), *((name, percentile(share)) for name, share in shares.items())]
