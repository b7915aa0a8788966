"""How one engine may lie on GPUs, and the least that requests take on it: bounds for a search."""

from bisect import bisect_right
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.errors import InputError
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.step_cost import build_step_cost
from meshwright.predict.serving.sim.latency import LatencySLO
from meshwright.predict.serving.sim.prefix_keys import count_uncached_tokens
from meshwright.predict.serving.sim.serving_fleet import count_kv_blocks, default_scheduler_config
from meshwright.spec.cluster import Cluster
from meshwright.spec.field_checks import raise_problems
from meshwright.spec.layout import Layout
from meshwright.spec.layout.constraints import check_tensor_parallel
from meshwright.spec.layout.layout_names import format_degrees
from meshwright.spec.model import AttentionSpec, Model
from meshwright.spec.units import format_quantity, format_seconds
from meshwright.spec.workload import WorkloadRequest

DEGREES = (1, 2, 4, 8, 16, 32, 64)


class EngineSpace(NamedTuple):
    """Which degrees are looked at; None looks at all that make sense."""

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None


class EngineLayouts(NamedTuple):
    """Layouts of one engine."""

    layouts: tuple[Layout, ...]
    infeasible: dict[str, str]
    """Those that were asked for and are none, with the reason."""


class RequestStats(NamedTuple):
    """What the requests of a stream are like."""

    prompt_tokens: float
    output_tokens: float
    """Means."""
    uncached_tokens: float
    """Mean of the tokens that prompts do not share with one before them."""
    long_uncached_tokens: int
    """So many of a prompt's tokens are fresh, or more, in more requests than may be late."""
    rate_per_s: float


class EngineCandidate(NamedTuple):
    """One way to lay out an engine, and the least that a request takes there."""

    replica: Replica
    prefill_bound_s: float
    """Seconds of an engine that computing a mean prompt takes at best."""
    decode_bound_s: float
    """Seconds of an engine that decoding a mean answer takes at best, in the largest batch."""

    @property
    def bound_s(self) -> float:
        """Seconds of an engine that a request takes, were both done at once."""
        return max(self.prefill_bound_s, self.decode_bound_s)


def compute_request_stats(requests: list[WorkloadRequest], attain: float = 0.99) -> RequestStats:
    """Return what requests are like, of which a share of `attain` has to be in time."""
    prompts = np.array([one.prompt_tokens for one in requests])
    outputs = np.array([max(1, one.output_tokens) for one in requests])
    fresh = np.array(count_uncached_tokens(requests))
    # The one below: between two requests, a single one more would already be late.
    long = np.percentile(fresh, min(99.0, 100 * attain), method="lower")
    span = requests[-1].arrival_s - requests[0].arrival_s
    rate = (len(requests) - 1) / span if span > 0 else float("inf")
    return RequestStats(
        float(prompts.mean()), float(outputs.mean()), float(fresh.mean()), int(long), rate
    )


def list_engine_layouts(
    model: Model, cluster: Cluster, most_gpus: int, space: EngineSpace
) -> EngineLayouts:
    """Return the layouts of one engine that can be, those on few GPUs first."""
    heads = [block.mixer.heads for block in model.blocks if isinstance(block.mixer, AttentionSpec)]
    fitting = (n for n in DEGREES if n <= cluster.scale_up.gpus and not any(h % n for h in heads))
    asked = [
        (tp, pp, dp, ep)
        for tp in space.tp or tuple(fitting)
        for pp in space.pp or tuple(n for n in DEGREES[:4] if n <= model.layers)
        for dp in space.dp or (DEGREES if model.moe is not None else (1,))
        for ep in space.ep or _expert_groups(model, tp * dp)
    ]
    asked.sort(key=lambda one: (one[0] * one[1] * one[2], one))
    found: list[Layout] = []
    refused: dict[str, str] = {}
    for tp, pp, dp, ep in asked:
        if (gpus := tp * pp * dp) > most_gpus:
            # Of degrees that nobody asked for, a 1 speaks for all others.
            left = zip((tp, pp, dp, ep), space, strict=True)
            if all(value == 1 for value, given in left if not given):
                what = f"takes {format_quantity(gpus, 'GPU')}, and there may be {most_gpus}"
                refused[format_degrees(tp, pp, dp, ep)] = what
            continue
        try:
            layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep, expert_tp=max(1, tp * dp // ep))
            raise_problems(check_tensor_parallel(tp, model))
        except InputError as error:
            refused[format_degrees(tp, pp, dp, ep)] = error.problems[0].what
        else:
            found.append(layout)
    return EngineLayouts(tuple(found), refused)


def build_candidate(
    layout: Layout, one: Replica, asked: RequestStats, objective: LatencySLO
) -> EngineCandidate | str:
    """Return an engine like `one` with another layout, and its bounds; or why it cannot do."""
    try:
        replica = msgspec.structs.replace(one, layout=layout)
        limits = default_scheduler_config(replica)
        mean = asked.prompt_tokens + asked.output_tokens
        blocks = count_kv_blocks(replica, limits, mean)
    except InputError as error:
        return error.problems[0].what
    cost = build_step_cost(replica)
    context = asked.prompt_tokens + asked.output_tokens / 2

    def step_s(batch: int) -> float:
        return cost.decode_steps_s(batch, batch * context, 1)

    # What prompts share is found in the cache at best, wherever they are sent.
    long = asked.long_uncached_tokens
    alone_s = cost.step_s(prefill_tokens=long, prefill_pairs=long * long / 2, sampled=1)
    around_s = replica.engine.frontend_s
    around_s += replica.engine.frontend_steps * cost.decode_steps_s(1, long, 1)
    if alone_s + around_s > objective.get("ttft", float("inf")):
        took, around = format_seconds(alone_s), format_seconds(around_s)
        what = f"a prompt of {long:,} tokens takes"
        if asked.uncached_tokens < asked.prompt_tokens:
            what = f"{long:,} tokens that no prompt had before take"
        return f"{what} {took} alone, and {around} around the engine"
    gap_s = min(objective.get("itl", float("inf")), objective.get("tpot", float("inf")))
    room = blocks * limits.block_size
    if room < mean:
        return "the KV cache holds no mean request"
    most = min(int(room / (asked.uncached_tokens + asked.output_tokens)), limits.max_num_seqs)
    if step_s(1) > gap_s:
        return f"a token takes {format_seconds(step_s(1))} with one request alone"
    batch = bisect_right(range(1, most + 1), gap_s, key=step_s)
    # The largest steps are the most efficient, and share their weights with those who decode.
    tokens = max(limits.max_num_batched_tokens, 8192)
    many = tokens / asked.uncached_tokens
    full_s = cost.step_s(
        prefill_tokens=tokens, prefill_pairs=many * asked.uncached_tokens**2 / 2, sampled=int(many)
    )
    half_s = cost.step_s(
        prefill_tokens=tokens // 2,
        prefill_pairs=many * asked.uncached_tokens**2 / 4,
        sampled=int(many / 2),
    )
    prompt_s = (full_s - half_s) / (tokens / 2) * asked.uncached_tokens
    return EngineCandidate(replica, prompt_s, (asked.output_tokens - 1) * step_s(batch) / batch)


def _expert_groups(model: Model, gpus: int) -> tuple[int, ...]:
    """Return into how many groups experts may be spread: none, or over all GPUs of a stage."""
    if model.moe is None or gpus == 1:
        return (1,)
    return (1, gpus)
