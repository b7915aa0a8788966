"""Summary of a request trace: its statistics, and a `ServingWorkload` derived from it."""

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.workload.arrivals import Arrivals, GammaArrivals
from meshwright.spec.workload.lengths import EmpiricalLength, fit_empirical_length
from meshwright.spec.workload.request_trace import RequestTrace
from meshwright.spec.workload.requests import ServingWorkload, WorkloadRequest


class LengthStats(msgspec.Struct, frozen=True, kw_only=True):
    """How a set of lengths is spread, in tokens."""

    mean: float
    """The mean."""
    min: int
    """The shortest."""
    p50: int
    """Half of them are not above this."""
    p90: int
    """Nine in ten are not above this."""
    p99: int
    """99 in 100 are not above this."""
    max: int
    """The longest."""


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a request trace."""

    requests: int
    """Requests in the trace."""
    duration_s: float | None
    """Seconds from the first arrival to the last; None where times were not recorded."""
    rate_per_s: float | None
    """Mean arrivals per second; None where it cannot be told."""
    arrival_cv: float | None
    """Burstiness: standard deviation of the gaps over their mean; 1 is a Poisson stream."""
    prompt: LengthStats
    """Tokens of the prompts."""
    output: LengthStats
    """Tokens of the answers."""
    prefix_reuse_share: float
    """Share of all prompt tokens that an endless prefix cache would already hold."""


def summarize_trace(trace: RequestTrace) -> TraceSummary:
    """Return the figures of a trace."""
    requests = _some(trace)
    duration_s, rate_per_s, cv = _arrivals(trace)
    return TraceSummary(
        requests=len(requests),
        duration_s=duration_s,
        rate_per_s=rate_per_s,
        arrival_cv=cv,
        prompt=_spread([request.prompt_tokens for request in requests]),
        output=_spread([request.output_tokens for request in requests]),
        prefix_reuse_share=_reuse(requests),
    )


def fit_workload(
    trace: RequestTrace, arrival: Arrivals | None = None, bins: int = 200
) -> ServingWorkload:
    """Return a described stream that is like the trace.

    Arrivals become a gamma process of the same rate and burstiness, unless `arrival` is given;
    lengths become histograms of at most `bins` equally heavy lengths with the same mean. Two things
    are lost: that long prompts may come with long answers, and prefix sharing; replay the trace
    where they matter.
    """
    requests = _some(trace)
    if arrival is None:
        _, rate_per_s, cv = _arrivals(trace)
        if rate_per_s is None or cv is None:
            what = "has no arrival times to fit"
            raise InputError([Problem("trace", what, "give an arrival process")])
        arrival = GammaArrivals(rate_per_s=rate_per_s, cv=min(100.0, max(0.01, cv)))
    return ServingWorkload(
        arrival=arrival,
        prompt=_binned([request.prompt_tokens for request in requests], bins),
        output=_binned([request.output_tokens for request in requests], bins),
    )


def _some(trace: RequestTrace) -> tuple[WorkloadRequest, ...]:
    if not trace.requests:
        raise InputError([Problem("trace", "holds no requests", "give at least one")])
    return trace.requests


def _arrivals(trace: RequestTrace) -> tuple[float | None, float | None, float | None]:
    """Return the duration, the rate and the variation of the gaps, as far as they are known."""
    if not trace.has_times:
        return None, None, None
    times = [request.arrival_s for request in trace.requests]
    duration_s = times[-1] - times[0]
    if not duration_s > 0:
        return duration_s, None, None
    gaps = [after - before for before, after in pairwise(times)]
    mean = duration_s / len(gaps)
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    return duration_s, 1 / mean, math.sqrt(variance) / mean


def _spread(lengths: list[int]) -> LengthStats:
    ordered = sorted(lengths)
    last = len(ordered) - 1

    def quantile(percent: int) -> int:
        # The nearest rank: the shortest length that `percent` of them do not exceed.
        return ordered[min(last, -(-percent * len(ordered) // 100) - 1)]

    return LengthStats(
        mean=sum(ordered) / len(ordered),
        min=ordered[0],
        p50=quantile(50),
        p90=quantile(90),
        p99=quantile(99),
        max=ordered[-1],
    )


def _binned(lengths: list[int], bins: int) -> EmpiricalLength:
    if bins < 1:
        raise InputError([Problem("bins", f"{bins} is not a number of bins", "use 1 or more")])
    if len(set(lengths)) <= bins:
        return fit_empirical_length(lengths)
    ordered, count = sorted(lengths), len(lengths)
    edges = [count * place // bins for place in range(bins + 1)]
    weights: dict[int, float] = {}
    for start, end in pairwise(edges):
        middle = round(sum(ordered[start:end]) / (end - start))
        weights[middle] = weights.get(middle, 0.0) + (end - start)
    return EmpiricalLength(values=tuple(weights), weights=tuple(weights.values()))


def _reuse(requests: Sequence[WorkloadRequest]) -> float:
    """Share of the prompt tokens in leading blocks that an earlier request had already brought."""
    seen: set[int] = set()
    reused = 0
    for request in requests:
        hits = 0
        for block in request.prefix_blocks:
            if block not in seen:
                break
            hits += 1
        reused += min(hits * request.block_tokens, request.prompt_tokens)
        seen.update(request.prefix_blocks[hits:])
    return reused / sum(request.prompt_tokens for request in requests)
