"""`ServingMetrics`: latencies, throughput, goodput, occupancy and cost of a simulated run.

Latencies have the names and the meaning that load generators give them:

    ttft    from sending a request to its first token
    itl     between two tokens of a request, every gap counted
    tpot    from the first token to the last, over the tokens between
    e2e     from sending to the last token
"""

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.predict.serving.sim.latency import (
    LATENCIES,
    MAX_LATE_TOKEN_SHARE,
    LatencySLO,
    LatencyStats,
    compute_latency_stats,
)
from meshwright.predict.serving.sim.served_requests import (
    ServedRequests,
    count_slow_gaps,
    list_token_gaps,
)
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, ServingFleet
from meshwright.predict.serving.sim.simulated_engine import Floats, StepRuns

MILLION = 1e6


class ServingMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run."""

    requests: int
    rejected_requests: int
    """Requests that are longer than the KV cache of an engine."""
    seconds: float
    """From the first arrival to the last token."""
    latency: dict[str, LatencyStats]
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    slo_attainment: float | None
    """Share of all requests that kept to the objective; None without one."""
    goodput_requests_per_s: float | None
    slo_violations: dict[str, float] | None
    """Share of all requests that missed each part of the objective."""
    cached_share: float
    """Share of the prompts' tokens that were found in the prefix cache."""
    preemptions: int
    engine_utilization: float
    """Share of the time in which engines compute, over all of them."""
    mean_decode_batch: float
    """Mean number of requests that decode in a step which decodes."""
    mean_kv_usage: float
    """Mean share of the KV cache in use, over time and engines that decode."""
    max_kv_usage: float
    mean_waiting_requests: float
    """Mean number of requests that wait for a place, at all engines together."""
    gpus: int
    dollars_per_million_tokens: float | None
    """Price of the GPUs over the answers' tokens; None where the cluster has no price."""
    joules_per_token: float | None
    """At the GPUs' power limit while they compute: an upper bound; None where it is not known."""


def compute_serving_metrics(
    served: ServedRequests, fleet: ServingFleet, objective: LatencySLO | None = None
) -> ServingMetrics:
    """Return the figures of a run."""
    good = served.completed
    seconds = served.seconds
    outputs = float(served.output_tokens[good].sum())
    prompts = float(served.prompt_tokens[good].sum())
    dollars = fleet.dollars_per_hour
    watts = fleet.serving_pool.replica.cluster.gpu.tdp_w
    decoding = served.engines[served.prefill_engines :]
    misses = None if objective is None else _misses(served, objective)
    kept = None if misses is None else ~np.logical_or.reduce([*misses.values(), ~good])
    busy = [float((did.end_s - did.start_s).sum()) for did in served.engines]
    gpus_busy_s = sum(
        one * copies.replica.gpus for one, copies in zip(busy, _copies_of(fleet), strict=True)
    )
    return ServingMetrics(
        requests=len(good),
        rejected_requests=int((~good).sum()),
        seconds=seconds,
        latency=compute_latencies(served),
        requests_per_s=_over(float(good.sum()), seconds),
        prompt_tokens_per_s=_over(prompts, seconds),
        output_tokens_per_s=_over(outputs, seconds),
        slo_attainment=None if kept is None else float(kept.mean()),
        goodput_requests_per_s=None if kept is None else _over(float(kept.sum()), seconds),
        slo_violations=None if misses is None else {n: float(m.mean()) for n, m in misses.items()},
        cached_share=_over(float(served.cached_tokens.sum()), prompts),
        preemptions=int(served.preemptions.sum()),
        engine_utilization=_over(gpus_busy_s, seconds * fleet.gpus),
        mean_decode_batch=_batch(decoding),
        mean_kv_usage=_mean_over_time(
            decoding, served.kv_blocks[served.prefill_engines :], seconds
        ),
        max_kv_usage=max(
            float(did.used_blocks.max(initial=0.0)) / size
            for did, size in zip(served.engines, served.kv_blocks, strict=True)
        ),
        mean_waiting_requests=sum(
            _over(float(((did.end_s - did.start_s) * did.waiting).sum()), seconds)
            for did in served.engines
        ),
        gpus=fleet.gpus,
        dollars_per_million_tokens=(
            None if dollars is None or not outputs else dollars / 3600 * seconds / outputs * MILLION
        ),
        joules_per_token=None if watts is None or not outputs else watts * gpus_busy_s / outputs,
    )


def compute_latencies(served: ServedRequests) -> dict[str, LatencyStats]:
    """Return how each latency is spread over the requests that were answered."""
    found = {}
    for name in LATENCIES:
        if name == "itl":
            gaps = list_token_gaps(served)
            spread = weighted_latency_stats(gaps.seconds, gaps.counts)
        else:
            values = _values(served, name)
            spread = compute_latency_stats(values[~np.isnan(values)])
        if spread is not None:
            found[name] = spread
    return found


def meets_slo(served: ServedRequests, objective: LatencySLO) -> npt.NDArray[np.bool_]:
    """Tell which requests kept to an objective."""
    missed = np.logical_or.reduce([*_misses(served, objective).values(), ~served.completed])
    kept: npt.NDArray[np.bool_] = ~missed
    return kept


def weighted_latency_stats(values: Floats, counts: Floats) -> LatencyStats | None:
    """Return the same of values that there are many of, each as often as it counts."""
    values, counts = values[counts > 0], counts[counts > 0]
    if not len(values):
        return None
    order = np.argsort(values)
    values, total = values[order], np.cumsum(counts[order])
    at = np.searchsorted(total, np.array((0.5, 0.9, 0.95, 0.99)) * total[-1])
    p50, p90, p95, p99 = (float(value) for value in values[np.minimum(at, len(values) - 1)])
    return LatencyStats(
        mean_s=float(np.average(values, weights=counts[order])),
        p50_s=p50,
        p90_s=p90,
        p95_s=p95,
        p99_s=p99,
        max_s=float(values[-1]),
    )


def _values(served: ServedRequests, name: str) -> Floats:
    if name == "ttft":
        return served.first_s - served.arrival_s
    if name == "e2e":
        return served.end_s - served.arrival_s
    several = served.output_tokens > 1
    tokens = np.where(several, served.output_tokens - 1, 1)
    return np.where(several, (served.end_s - served.first_s) / tokens, np.nan)


def _misses(served: ServedRequests, objective: LatencySLO) -> dict[str, npt.NDArray[np.bool_]]:
    """Tell for each part of an objective which requests missed it."""
    found = {}
    for name, longest_s in objective.items():
        if name == "itl":
            allowed = MAX_LATE_TOKEN_SHARE * (served.output_tokens - 1)
            found[name] = count_slow_gaps(served, longest_s) > allowed
        else:
            found[name] = _values(served, name) > longest_s
    return found


def _copies_of(fleet: ServingFleet) -> list[ReplicaPool]:
    before = [fleet.prefill_pool] * fleet.prefill_pool.count if fleet.prefill_pool else []
    return before + [fleet.serving_pool] * fleet.serving_pool.count


def _batch(engines: tuple[StepRuns, ...]) -> float:
    tokens = sum(float((did.steps * did.decodes).sum()) for did in engines)
    steps = sum(float(did.steps[did.decodes > 0].sum()) for did in engines)
    return _over(tokens, steps)


def _mean_over_time(
    engines: tuple[StepRuns, ...], blocks: tuple[int, ...], seconds: float
) -> float:
    shares = [
        _over(float(((did.end_s - did.start_s) * did.used_blocks).sum()), seconds * size)
        for did, size in zip(engines, blocks, strict=True)
    ]
    return _over(sum(shares), len(shares))


def _over(count: float, whole: float) -> float:
    return count / whole if whole else 0.0
