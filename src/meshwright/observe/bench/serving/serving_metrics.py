"""What a run amounts to: latencies by percentile, throughput, goodput, and what went wrong."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.serving_result import ServingBenchRun
from meshwright.predict.serving.sim.latency import (
    LATENCIES,
    MAX_LATE_TOKEN_SHARE,
    LatencySLO,
    LatencyStats,
    compute_latency_stats,
)
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import parse_seconds

NUM_INTERVALS = 20
"""Into how many stretches of time a throughput is cut, to see how it varies."""


class MeasuredLatency(LatencyStats, frozen=True, kw_only=True):
    """How a latency that was measured is spread."""

    samples: int


class ServingBenchMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run; only requests that were counted and answered have latencies."""

    sent: int
    """Requests that were counted, whatever became of them."""
    completed: int
    duration_s: float
    """From the first of them sent to the last of them answered."""
    latency: dict[str, MeasuredLatency]
    """By the names of `LATENCIES`."""
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    steady_output_tokens_per_s: float | None
    """Output tokens per second while requests were still sent: without the last ones' tail."""
    request_goodput: float | None
    """Answered requests per second that kept to the objective; None without one."""
    goodput_share: float | None
    """Share of all sent that did."""
    errors: dict[str, int]
    """Failures by cause."""
    num_prompt_length_mismatches: int
    """Answers whose prompt the server counted with another length than it was made to have."""
    num_output_length_mismatches: int
    """Answers that are longer or shorter than they were to be."""
    prefix_cache_hit_rate: float
    """Share of the prompts' tokens that the server took from its cache, where it says so."""


def parse_slo(text: str, where: str) -> LatencySLO:
    """Read an objective such as `ttft=500ms,itl=50ms`."""
    found, problems = dict[str, float](), list[Problem]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name.strip() not in LATENCIES:
            problems.append(
                build_unknown_name_problem("latency", name.strip(), list(LATENCIES), where)
            )
            continue
        if re.fullmatch(r"\s*[\d.]+\s*", value):
            fix = f"write {name.strip()}={value.strip()}ms or {name.strip()}={value.strip()}s"
            problems.append(Problem(where, f"{part!r} has no unit", fix))
            continue
        found[name.strip()] = parse_seconds(value, f"{where} {name.strip()}")
    if problems or not found:
        raise InputError(problems or [Problem(where, "is empty", "write ttft=500ms,itl=50ms")])
    return found


def compute_serving_metrics(
    run: ServingBenchRun, objective: LatencySLO | None = None
) -> ServingBenchMetrics:
    """Return the figures of a run."""
    sent = [one for one in run.requests if one.in_metrics]
    good = select_completed_requests(run)
    seconds = _seconds(sent)
    kept = None if objective is None else sum(meets_slo(one, objective) for one in good)
    prompts = sum(_prompt(one) for one in good)
    outputs = sum(one.output_tokens for one in good)
    return ServingBenchMetrics(
        sent=len(sent),
        completed=len(good),
        duration_s=seconds,
        latency={
            name: found
            for name in LATENCIES
            if (found := _measured(collect_latency_samples(good, name))) is not None
        },
        requests_per_s=_over(len(good), seconds),
        prompt_tokens_per_s=_over(prompts, seconds),
        output_tokens_per_s=_over(outputs, seconds),
        total_tokens_per_s=_over(prompts + outputs, seconds),
        steady_output_tokens_per_s=_loaded(run),
        request_goodput=None if kept is None else _over(kept, seconds),
        goodput_share=None if kept is None else _over(kept, len(sent)),
        errors=dict(Counter(one.error for one in sent if one.error).most_common()),
        num_prompt_length_mismatches=sum(
            one.prompt_tokens not in (None, one.requested_prompt_tokens) for one in good
        ),
        num_output_length_mismatches=sum(
            one.output_tokens != max(1, one.requested_output_tokens) for one in good
        ),
        prefix_cache_hit_rate=_over(sum(one.cached_tokens for one in good), prompts),
    )


def select_completed_requests(run: ServingBenchRun) -> list[RequestResult]:
    """Return the requests that were counted and answered."""
    return [one for one in run.requests if one.in_metrics and not one.error]


def collect_latency_samples(served: Sequence[RequestResult], name: str) -> list[float]:
    """Return all values of a latency, in seconds; each request has many of `itl`."""
    if name == "itl":
        return [gap for one in served for gap in one.gaps_s]
    found = [_value(one, name) for one in served]
    return [value for value in found if value is not None]


def meets_slo(one: RequestResult, objective: LatencySLO) -> bool:
    """Say whether a request kept to an objective; of its own `itl` 99 in 100 have to."""
    for name, longest_s in objective.items():
        if name == "itl":
            gaps = one.gaps_s
            value = float(np.percentile(gaps, 100 * (1 - MAX_LATE_TOKEN_SHARE))) if gaps else None
        else:
            value = _value(one, name)
        if value is not None and value > longest_s:
            return False
    return True


def _value(one: RequestResult, name: str) -> float | None:
    found: float | None = getattr(one, f"{name}_s")
    return found


def _measured(values: Sequence[float]) -> MeasuredLatency | None:
    """Return how values are spread, and how many there are; None where there are none."""
    found = compute_latency_stats(values)
    return (
        None
        if found is None
        else MeasuredLatency(**msgspec.structs.asdict(found), samples=len(values))
    )


def compute_throughput_over_time(
    run: ServingBenchRun, stretches: int = NUM_INTERVALS
) -> list[tuple[float, float]]:
    """Return output tokens per second over equal stretches of a run, each at its middle."""
    sent = [one for one in run.requests if one.in_metrics]
    if not sent or not _seconds(sent):
        return []
    start = min(one.sent_s for one in sent)
    return compute_throughput_between(run, start, start + _seconds(sent), stretches)


def compute_throughput_between(
    run: ServingBenchRun, start_s: float, end_s: float, stretches: int
) -> list[tuple[float, float]]:
    """Return output tokens per second over equal stretches of a time, each at its middle."""
    edges = np.linspace(start_s, end_s, stretches + 1)
    came = [piece for one in run.requests for piece in one.chunk_arrivals]
    times, tokens = [at for at, _ in came], [count for _, count in came]
    counts, _ = np.histogram(times, bins=edges, weights=tokens)
    width = (end_s - start_s) / stretches
    return [
        (float((a + b) / 2), float(count) / width)
        for (a, b), count in zip(pairwise(edges), counts, strict=True)
    ]


def find_steady_window(run: ServingBenchRun) -> tuple[float, float] | None:
    """Return the time from the first answer's begin to the last request; None where it is empty."""
    sent = [one for one in run.requests if one.in_metrics]
    begun = [one.sent_s + one.ttft_s for one in sent if one.chunk_gaps_us]
    if not begun:
        return None
    first, last = min(begun), max(one.sent_s for one in sent)
    return (first, last) if last > first else None


def _loaded(run: ServingBenchRun) -> float | None:
    window = find_steady_window(run)
    return None if window is None else compute_throughput_between(run, *window, 1)[0][1]


def _prompt(one: RequestResult) -> int:
    return one.requested_prompt_tokens if one.prompt_tokens is None else one.prompt_tokens


def _seconds(sent: Sequence[RequestResult]) -> float:
    if not sent:
        return 0.0
    return max(one.end_s for one in sent) - min(one.sent_s for one in sent)


def _over(count: float, whole: float) -> float:
    return count / whole if whole else 0.0
