"""`Outcome`: what a simulated run amounts to. Latencies, throughput, goodput, occupancy, cost.

Latencies have the names and the meaning that load generators give them:

    ttft    from sending a request to its first token
    itl     between two tokens of a request, every gap counted
    tpot    from the first token to the last, over the tokens between
    e2e     from sending to the last token
"""

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.predict.serving.clocked import Floats, Stretches
from meshwright.predict.serving.fleet import Copies, Fleet
from meshwright.predict.serving.latency import (
    LATE_SHARE,
    LATENCIES,
    Objective,
    Spread,
    spread_of,
)
from meshwright.predict.serving.served import Served, slow_gaps, token_gaps

MILLION = 1e6


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run."""

    requests: int
    refused: int
    """Requests that are longer than the KV cache of an engine."""
    seconds: float
    """From the first arrival to the last token."""
    latency: dict[str, Spread]
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    good_share: float | None
    """Share of all requests that kept to the objective; None without one."""
    good_per_s: float | None
    missed: dict[str, float] | None
    """Share of all requests that missed each part of the objective."""
    cached_share: float
    """Share of the prompts' tokens that were found in the prefix cache."""
    preemptions: int
    busy_share: float
    """Share of the time in which engines compute, over all of them."""
    batch: float
    """Mean number of requests that decode in a step which decodes."""
    kv_share: float
    """Mean share of the KV cache in use, over time and engines that decode."""
    kv_most: float
    waiting: float
    """Mean number of requests that wait for a place, at all engines together."""
    gpus: int
    dollars_per_million_tokens: float | None
    """Price of the GPUs over the answers' tokens; None where the cluster has no price."""
    joules_per_token: float | None
    """At the GPUs' power limit while they compute: an upper bound; None where it is not known."""


def outcome_of(served: Served, fleet: Fleet, objective: Objective | None = None) -> Outcome:
    """Return the figures of a run."""
    good = served.answered
    seconds = served.seconds
    outputs = float(served.output_tokens[good].sum())
    prompts = float(served.prompt_tokens[good].sum())
    dollars = fleet.dollars_per_hour
    watts = fleet.serving.replica.cluster.gpu.tdp_w
    decoding = served.engines[served.prefill_engines :]
    misses = None if objective is None else _misses(served, objective)
    kept = None if misses is None else ~np.logical_or.reduce([*misses.values(), ~good])
    busy = [float((did.end_s - did.start_s).sum()) for did in served.engines]
    gpus_busy_s = sum(
        one * copies.replica.gpus for one, copies in zip(busy, _copies_of(fleet), strict=True)
    )
    return Outcome(
        requests=len(good),
        refused=int((~good).sum()),
        seconds=seconds,
        latency=latencies(served),
        requests_per_s=_over(float(good.sum()), seconds),
        prompt_tokens_per_s=_over(prompts, seconds),
        output_tokens_per_s=_over(outputs, seconds),
        good_share=None if kept is None else float(kept.mean()),
        good_per_s=None if kept is None else _over(float(kept.sum()), seconds),
        missed=None if misses is None else {n: float(m.mean()) for n, m in misses.items()},
        cached_share=_over(float(served.cached_tokens.sum()), prompts),
        preemptions=int(served.preempted.sum()),
        busy_share=_over(gpus_busy_s, seconds * fleet.gpus),
        batch=_batch(decoding),
        kv_share=_mean_over_time(decoding, served.blocks[served.prefill_engines :], seconds),
        kv_most=max(
            float(did.held.max(initial=0.0)) / size
            for did, size in zip(served.engines, served.blocks, strict=True)
        ),
        waiting=sum(
            _over(float(((did.end_s - did.start_s) * did.waiting).sum()), seconds)
            for did in served.engines
        ),
        gpus=fleet.gpus,
        dollars_per_million_tokens=(
            None if dollars is None or not outputs else dollars / 3600 * seconds / outputs * MILLION
        ),
        joules_per_token=None if watts is None or not outputs else watts * gpus_busy_s / outputs,
    )


def latencies(served: Served) -> dict[str, Spread]:
    """Return how each latency is spread over the requests that were answered."""
    found = {}
    for name in LATENCIES:
        if name == "itl":
            gaps = token_gaps(served)
            spread = weighted_spread(gaps.seconds, gaps.counts)
        else:
            values = _values(served, name)
            spread = spread_of(values[~np.isnan(values)])
        if spread is not None:
            found[name] = spread
    return found


def keeps(served: Served, objective: Objective) -> npt.NDArray[np.bool_]:
    """Tell which requests kept to an objective."""
    missed = np.logical_or.reduce([*_misses(served, objective).values(), ~served.answered])
    kept: npt.NDArray[np.bool_] = ~missed
    return kept


def weighted_spread(values: Floats, counts: Floats) -> Spread | None:
    """Return the same of values that there are many of, each as often as it counts."""
    values, counts = values[counts > 0], counts[counts > 0]
    if not len(values):
        return None
    order = np.argsort(values)
    values, total = values[order], np.cumsum(counts[order])
    at = np.searchsorted(total, np.array((0.5, 0.9, 0.95, 0.99)) * total[-1])
    p50, p90, p95, p99 = (float(value) for value in values[np.minimum(at, len(values) - 1)])
    return Spread(
        mean_s=float(np.average(values, weights=counts[order])),
        p50_s=p50,
        p90_s=p90,
        p95_s=p95,
        p99_s=p99,
        most_s=float(values[-1]),
    )


def _values(served: Served, name: str) -> Floats:
    if name == "ttft":
        return served.first_s - served.arrival_s
    if name == "e2e":
        return served.end_s - served.arrival_s
    several = served.output_tokens > 1
    tokens = np.where(several, served.output_tokens - 1, 1)
    return np.where(several, (served.end_s - served.first_s) / tokens, np.nan)


def _misses(served: Served, objective: Objective) -> dict[str, npt.NDArray[np.bool_]]:
    """Tell for each part of an objective which requests missed it."""
    found = {}
    for name, longest_s in objective.items():
        if name == "itl":
            allowed = LATE_SHARE * (served.output_tokens - 1)
            found[name] = slow_gaps(served, longest_s) > allowed
        else:
            found[name] = _values(served, name) > longest_s
    return found


def _copies_of(fleet: Fleet) -> list[Copies]:
    before = [fleet.prefill] * fleet.prefill.count if fleet.prefill else []
    return before + [fleet.serving] * fleet.serving.count


def _batch(engines: tuple[Stretches, ...]) -> float:
    tokens = sum(float((did.steps * did.decodes).sum()) for did in engines)
    steps = sum(float(did.steps[did.decodes > 0].sum()) for did in engines)
    return _over(tokens, steps)


def _mean_over_time(
    engines: tuple[Stretches, ...], blocks: tuple[int, ...], seconds: float
) -> float:
    shares = [
        _over(float(((did.end_s - did.start_s) * did.held).sum()), seconds * size)
        for did, size in zip(engines, blocks, strict=True)
    ]
    return _over(sum(shares), len(shares))


def _over(count: float, whole: float) -> float:
    return count / whole if whole else 0.0
