"""What a simulated serving run looks like on one screen, and as a picture."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.cli.answer import View, facts, table
from meshwright.cli.curve_svg import Chart, Curve, draw
from meshwright.cli.files import write_text
from meshwright.predict.serving.clocked import Floats
from meshwright.predict.serving.fleet import Copies, Fleet, blocks_of
from meshwright.predict.serving.latency import LATENCIES
from meshwright.predict.serving.outcome import Outcome
from meshwright.predict.serving.served import Served
from meshwright.spec.layout.words import short_name
from meshwright.spec.serving import Limits
from meshwright.spec.units import format_count, format_seconds, format_some

TITLES = {
    "ttft": "first token (ttft)",
    "itl": "between tokens (itl)",
    "tpot": "per token (tpot)",
    "e2e": "end to end (e2e)",
}
_RATED = re.compile(r" requests?/s$")
_POINTS = 300


class Run(NamedTuple):
    """One stream of requests, and what became of it."""

    name: str
    served: Served
    outcome: Outcome


def screen(
    fleet: Fleet, runs: Sequence[Run], objective: Mapping[str, float] | None, attain: float
) -> tuple[View, ...]:
    """Lay runs out."""
    if len(runs) == 1:
        return (_head(fleet, runs[0]), *_one(runs[0], objective, attain))
    return (_head(fleet, runs[0]), _many(runs, objective))


def engines_words(fleet: Fleet) -> str:
    """Say which engines there are."""
    own = f"{fleet.serving.count} × {layout_words(fleet.serving)}"
    if fleet.prefill is None:
        return own
    return f"{fleet.prefill.count} × {layout_words(fleet.prefill)} for prompts, {own} decode"


def limits_words(limits: Limits) -> str:
    """Say how much one engine takes at a time."""
    requests = format_some(limits.batch_requests, "request")
    return f"{requests}, {format_some(limits.batch_tokens, 'token')} a step"


def layout_words(copies: Copies) -> str:
    """Say how one engine lies on its GPUs."""
    return short_name(copies.replica.layout, ", ")


def _head(fleet: Fleet, run: Run) -> View:
    replica, limits = fleet.serving.replica, fleet.serving.limits
    served = run.served
    tokens = float((served.prompt_tokens + served.output_tokens).mean())
    blocks = blocks_of(replica, limits, tokens)
    price = fleet.dollars_per_hour
    return facts(
        {
            "model": f"{replica.model.name}, {replica.formats.weights} weights, "
            f"{replica.formats.kv} KV cache",
            "on": f"{fleet.gpus} × {replica.cluster.gpu.name}"
            + ("" if price is None else f", ${price:,.2f} an hour"),
            "engines": f"{engines_words(fleet)}; as {replica.engine.name}",
            "limits": f"{limits_words(limits)}, "
            f"KV cache of {format_count(blocks * limits.block_tokens)} tokens",
        }
    )


def _one(run: Run, objective: Mapping[str, float] | None, attain: float) -> tuple[View, ...]:
    found, served = run.outcome, run.served
    rows = [
        (TITLES[name], *(format_seconds(value) for value in (
            spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s, spread.most_s)))
        for name, spread in found.latency.items()
    ]  # fmt: skip
    prompts = format_count(float(served.prompt_tokens.mean()))
    outputs = format_count(float(served.output_tokens.mean()))
    refused = f", {found.refused:,} refused: too long" if found.refused else ""
    asked = f"{found.requests:,}, {run.name}; mean prompt {prompts}, answer {outputs} tokens"
    views: list[View] = [
        facts({"requests": asked + refused}),
        table("latency, mean, p50, p90, p99, most", rows, right="mean, p50, p90, p99, most"),
    ]
    pairs = {
        "throughput": f"{format_count(found.output_tokens_per_s)} output tokens/s, "
        f"{format_count(found.prompt_tokens_per_s)} prompt tokens/s, "
        + format_some(found.requests_per_s, "request/s", "requests/s"),
    }
    if objective is not None and found.good_share is not None:
        pairs["objective"] = objective_words(objective, found, attain)
    pairs |= {
        "engines": f"{found.busy_share:.0%} busy, "
        f"{format_some(found.batch, 'request decodes', 'requests decode')} in a step, "
        f"{found.waiting:.3g} wait",
        "KV cache": f"{found.kv_share:.1%} in use, {found.kv_most:.1%} at most; "
        f"{format_some(found.preemptions, 'preemption')}, "
        f"{found.cached_share:.0%} of prompts from cache",
        "price": _price(found),
        "energy": ""
        if found.joules_per_token is None
        else f"at most {found.joules_per_token:.3g} J for a token of an answer",
    }
    return (*views, facts(pairs))


def objective_words(objective: Mapping[str, float], found: Outcome, attain: float) -> str:
    """Say how many requests kept to an objective, and which part the others missed."""
    asked = ", ".join(f"{name} ≤ {format_seconds(value)}" for name, value in objective.items())
    missed = found.missed or {}
    worst = max(missed, key=lambda name: missed[name], default="")
    share = found.good_share or 0.0
    said = f"{share:.1%} keep to {asked}"
    if found.good_per_s is not None:
        said += f" ({format_some(found.good_per_s, 'request/s', 'requests/s')})"
    if share < attain:
        said += f"; {missed[worst]:.1%} miss {worst}" if missed.get(worst) else ""
    return said


def _price(found: Outcome) -> str:
    if found.dollars_per_million_tokens is None:
        return ""
    return f"${found.dollars_per_million_tokens:.3g} for a million tokens of answers"


def _many(runs: Sequence[Run], objective: Mapping[str, float] | None) -> View:
    rows = []
    for name, _, found in runs:
        latency = [
            format_seconds(getattr(found.latency[one], field)) if one in found.latency else ""
            for one in ("ttft", "itl")
            for field in ("p50_s", "p99_s")
        ]
        good = "" if found.good_share is None else f"{found.good_share:.1%}"
        price = found.dollars_per_million_tokens
        rows.append(
            (
                _RATED.sub("/s", name), *latency,
                format_count(found.output_tokens_per_s), f"{found.busy_share:.0%}",
                f"{found.kv_most:.0%}", good, "" if price is None else f"{price:.3g}",
            )
        )  # fmt: skip
    columns = "load, ttft p50, p99, itl p50, p99 , tokens/s, busy, KV, good, $/M"
    if objective is None:
        rows = [(*row[:8], row[9]) for row in rows]
        columns = columns.replace(" good,", "")
    right = ", ".join(columns.split(", ")[1:])
    return table(columns, rows, right=right)


def plot(path: str, runs: Sequence[Run]) -> None:
    """Draw latencies over the load, or what happens over time where there is one run."""
    write_text(path, draw(_over_time(runs[0].served) if len(runs) == 1 else _over_load(runs)))


def _over_load(runs: Sequence[Run]) -> list[Chart]:
    def curve(name: str, field: str) -> Curve:
        points = [
            (one.outcome.requests_per_s, getattr(one.outcome.latency[name], field) * 1e3)
            for one in runs
            if name in one.outcome.latency
        ]
        return Curve(field.removesuffix("_s"), sorted(points), dots=True)

    across = "requests/s"
    charts = [
        Chart(TITLES[name], [curve(name, "p50_s"), curve(name, "p99_s")], "ms", across, 0.0)
        for name in LATENCIES
        if name != "tpot"
    ]
    tokens = [(one.outcome.requests_per_s, one.outcome.output_tokens_per_s) for one in runs]
    rate = Curve("tokens/s", sorted(tokens), dots=True)
    return [*charts, Chart("throughput", [rate], "tokens/s", across, 0.0)]


def _over_time(served: Served) -> list[Chart]:
    ends = [float(did.end_s[-1]) for did in served.engines if len(did.end_s)]
    grid = np.linspace(0.0, max(ends, default=1.0), _POINTS)
    names = [f"engine {number}" for number in range(len(served.engines))]

    def curves(field: str, scale: Sequence[float]) -> list[Curve]:
        return [
            Curve(name, _sampled(grid, did.start_s, getattr(did, field) / by))
            for name, did, by in zip(names, served.engines, scale, strict=True)
        ]

    ones = [1.0] * len(names)
    shares = [size / 100 for size in served.blocks]
    return [
        Chart("requests running", curves("running", ones), "", "s", 0.0),
        Chart("requests waiting", curves("waiting", ones), "", "s", 0.0),
        Chart("KV cache in use", curves("held", shares), "%", "s", 0.0),
    ]


def _sampled(grid: Floats, start_s: Floats, values: Floats) -> list[tuple[float, float]]:
    """Return what held at each moment."""
    if not len(values):
        return []
    at = np.searchsorted(start_s, grid, side="right") - 1
    held = np.where(at >= 0, values[np.maximum(at, 0)], 0.0)
    return list(zip(grid.tolist(), held.tolist(), strict=True))
