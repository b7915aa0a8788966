"""What a simulated serving run looks like on one screen, and as a picture."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.cli.render.files import write_text
from meshwright.cli.render.line_chart import ChartLine, LineChart, draw_line_charts
from meshwright.cli.result import View, make_fields, make_table
from meshwright.predict.serving.sim.latency import LATENCIES
from meshwright.predict.serving.sim.served_requests import ServedRequests
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, ServingFleet, count_kv_blocks
from meshwright.predict.serving.sim.serving_metrics import ServingMetrics
from meshwright.predict.serving.sim.simulated_engine import Floats
from meshwright.spec.layout.layout_names import format_short_name
from meshwright.spec.scheduler_config import SchedulerConfig
from meshwright.spec.units import format_count, format_quantity, format_seconds

TITLES = {
    "ttft": "first token (ttft)",
    "itl": "between tokens (itl)",
    "tpot": "per token (tpot)",
    "e2e": "end to end (e2e)",
}
_RATED = re.compile(r" requests?/s$")
_POINTS = 300


class SimulatedStream(NamedTuple):
    """One stream of requests, and what became of it."""

    name: str
    served: ServedRequests
    outcome: ServingMetrics


def render_streams(
    fleet: ServingFleet,
    runs: Sequence[SimulatedStream],
    objective: Mapping[str, float] | None,
    attain: float,
) -> tuple[View, ...]:
    """Lay runs out."""
    if len(runs) == 1:
        return (_head(fleet, runs[0]), *_one(runs[0], objective, attain))
    return (_head(fleet, runs[0]), _many(runs, objective))


def format_engines(fleet: ServingFleet) -> str:
    """Say which engines there are."""
    own = f"{fleet.serving_pool.count} × {format_engine_layout(fleet.serving_pool)}"
    if fleet.prefill_pool is None:
        return own
    return (
        f"{fleet.prefill_pool.count} × {format_engine_layout(fleet.prefill_pool)} for prompts, "
        f"{own} decode"
    )


def format_limits(limits: SchedulerConfig) -> str:
    """Say how much one engine takes at a time."""
    requests = format_quantity(limits.max_num_seqs, "request")
    return f"{requests}, {format_quantity(limits.max_num_batched_tokens, 'token')} a step"


def format_engine_layout(copies: ReplicaPool) -> str:
    """Say how one engine lies on its GPUs."""
    return format_short_name(copies.replica.layout, ", ")


def _head(fleet: ServingFleet, run: SimulatedStream) -> View:
    replica, limits = fleet.serving_pool.replica, fleet.serving_pool.scheduler_config
    served = run.served
    tokens = float((served.prompt_tokens + served.output_tokens).mean())
    blocks = count_kv_blocks(replica, limits, tokens)
    price = fleet.dollars_per_hour
    return make_fields(
        {
            "model": f"{replica.model.name}, {replica.quantization.weights} weights, "
            f"{replica.quantization.kv} KV cache",
            "on": f"{fleet.gpus} × {replica.cluster.gpu.name}"
            + ("" if price is None else f", ${price:,.2f} an hour"),
            "engines": f"{format_engines(fleet)}; as {replica.engine.name}",
            "limits": f"{format_limits(limits)}, "
            f"KV cache of {format_count(blocks * limits.block_size)} tokens",
        }
    )


def _one(
    run: SimulatedStream, objective: Mapping[str, float] | None, attain: float
) -> tuple[View, ...]:
    found, served = run.outcome, run.served
    rows = [
        (TITLES[name], *(format_seconds(value) for value in (
            spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s, spread.max_s)))
        for name, spread in found.latency.items()
    ]  # fmt: skip
    prompts = format_count(float(served.prompt_tokens.mean()))
    outputs = format_count(float(served.output_tokens.mean()))
    refused = f", {found.rejected_requests:,} refused: too long" if found.rejected_requests else ""
    asked = f"{found.requests:,}, {run.name}; mean prompt {prompts}, answer {outputs} tokens"
    views: list[View] = [
        make_fields({"requests": asked + refused}),
        make_table("latency, mean, p50, p90, p99, most", rows, right="mean, p50, p90, p99, most"),
    ]
    pairs = {
        "throughput": f"{format_count(found.output_tokens_per_s)} output tokens/s, "
        f"{format_count(found.prompt_tokens_per_s)} prompt tokens/s, "
        + format_quantity(found.requests_per_s, "request/s", "requests/s"),
    }
    if objective is not None and found.slo_attainment is not None:
        pairs["objective"] = format_slo_attainment(objective, found, attain)
    pairs |= {
        "engines": f"{found.engine_utilization:.0%} busy, "
        f"{format_quantity(found.mean_decode_batch, 'request decodes', 'requests decode')} in a "
        f"step, "
        f"{found.mean_waiting_requests:.3g} wait",
        "KV cache": f"{found.mean_kv_usage:.1%} in use, {found.max_kv_usage:.1%} at most; "
        f"{format_quantity(found.preemptions, 'preemption')}, "
        f"{found.cached_share:.0%} of prompts from cache",
        "price": _price(found),
        "energy": ""
        if found.joules_per_token is None
        else f"at most {found.joules_per_token:.3g} J for a token of an answer",
    }
    return (*views, make_fields(pairs))


def format_slo_attainment(
    objective: Mapping[str, float], found: ServingMetrics, attain: float
) -> str:
    """Say how many requests kept to an objective, and which part the others missed."""
    asked = ", ".join(f"{name} ≤ {format_seconds(value)}" for name, value in objective.items())
    missed = found.slo_violations or {}
    worst = max(missed, key=lambda name: missed[name], default="")
    share = found.slo_attainment or 0.0
    said = f"{share:.1%} meet {asked}"
    if found.goodput_requests_per_s is not None:
        said += f" ({format_quantity(found.goodput_requests_per_s, 'request/s', 'requests/s')})"
    if share < attain:
        said += f"; {missed[worst]:.1%} miss {worst}" if missed.get(worst) else ""
    return said


def _price(found: ServingMetrics) -> str:
    if found.dollars_per_million_tokens is None:
        return ""
    return f"${found.dollars_per_million_tokens:.3g} for a million tokens of answers"


def _many(runs: Sequence[SimulatedStream], objective: Mapping[str, float] | None) -> View:
    rows = []
    for name, _, found in runs:
        latency = [
            format_seconds(getattr(found.latency[one], field)) if one in found.latency else ""
            for one in ("ttft", "itl")
            for field in ("p50_s", "p99_s")
        ]
        good = "" if found.slo_attainment is None else f"{found.slo_attainment:.1%}"
        price = found.dollars_per_million_tokens
        rows.append(
            (
                _RATED.sub("/s", name), *latency,
                format_count(found.output_tokens_per_s), f"{found.engine_utilization:.0%}",
                f"{found.max_kv_usage:.0%}", good, "" if price is None else f"{price:.3g}",
            )
        )  # fmt: skip
    columns = "load, ttft p50, p99, itl p50, p99 , tokens/s, busy, KV, good, $/M"
    if objective is None:
        rows = [(*row[:8], row[9]) for row in rows]
        columns = columns.replace(" good,", "")
    right = ", ".join(columns.split(", ")[1:])
    return make_table(columns, rows, right=right)


def plot_latencies(path: str, runs: Sequence[SimulatedStream]) -> None:
    """Draw latencies over the load, or what happens over time where there is one run."""
    write_text(
        path, draw_line_charts(_over_time(runs[0].served) if len(runs) == 1 else _over_load(runs))
    )


def _over_load(runs: Sequence[SimulatedStream]) -> list[LineChart]:
    def curve(name: str, field: str) -> ChartLine:
        points = [
            (one.outcome.requests_per_s, getattr(one.outcome.latency[name], field) * 1e3)
            for one in runs
            if name in one.outcome.latency
        ]
        return ChartLine(field.removesuffix("_s"), sorted(points), show_points=True)

    across = "requests/s"
    charts = [
        LineChart(TITLES[name], [curve(name, "p50_s"), curve(name, "p99_s")], "ms", across, 0.0)
        for name in LATENCIES
        if name != "tpot"
    ]
    tokens = [(one.outcome.requests_per_s, one.outcome.output_tokens_per_s) for one in runs]
    rate = ChartLine("tokens/s", sorted(tokens), show_points=True)
    return [*charts, LineChart("throughput", [rate], "tokens/s", across, 0.0)]


def _over_time(served: ServedRequests) -> list[LineChart]:
    ends = [float(did.end_s[-1]) for did in served.engines if len(did.end_s)]
    grid = np.linspace(0.0, max(ends, default=1.0), _POINTS)
    names = [f"engine {number}" for number in range(len(served.engines))]

    def curves(field: str, scale: Sequence[float]) -> list[ChartLine]:
        return [
            ChartLine(name, _sampled(grid, did.start_s, getattr(did, field) / by))
            for name, did, by in zip(names, served.engines, scale, strict=True)
        ]

    ones = [1.0] * len(names)
    shares = [size / 100 for size in served.kv_blocks]
    return [
        LineChart("requests running", curves("running", ones), "", "s", 0.0),
        LineChart("requests waiting", curves("waiting", ones), "", "s", 0.0),
        LineChart("KV cache in use", curves("used_blocks", shares), "%", "s", 0.0),
    ]


def _sampled(grid: Floats, start_s: Floats, values: Floats) -> list[tuple[float, float]]:
    """Return what held at each moment."""
    if not len(values):
        return []
    at = np.searchsorted(start_s, grid, side="right") - 1
    held = np.where(at >= 0, values[np.maximum(at, 0)], 0.0)
    return list(zip(grid.tolist(), held.tolist(), strict=True))
