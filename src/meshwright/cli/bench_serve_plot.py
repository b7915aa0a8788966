"""Pictures of a server under load: latencies by percentile, over rates, and tokens over time."""

from collections.abc import Sequence

import numpy as np

from meshwright.cli.curve_svg import Chart, Curve, draw
from meshwright.cli.files import write_text
from meshwright.errors import Problem
from meshwright.observe.bench.serving.figures import (
    answered,
    figures_of,
    rates_over_time,
    samples,
)
from meshwright.observe.bench.serving.result import Result, Run
from meshwright.predict.serving.latency import LATENCIES
from meshwright.spec.bounds import require

_SHARES = (*range(99), 98.5, 99)
"""The last hundredth is left out: one straggler would flatten all the rest."""
_STRETCHES = 60


def write_plot(path: str, named: Sequence[tuple[str, Result]]) -> None:
    """Draw one result, or several in the same axes."""
    require(plot_problems(path))
    write_text(path, draw(charts(named)))


def plot_problems(path: str) -> list[Problem]:
    """Return what keeps a picture from having a name."""
    if path.lower().endswith(".svg"):
        return []
    return [Problem("--plot", f"{path} is drawn as SVG", "let its name end in .svg")]


def charts(named: Sequence[tuple[str, Result]]) -> list[Chart]:
    """Return the charts: those over rates only where several were measured."""
    runs = [(_label(name, run, result), run) for name, result in named for run in result.runs]
    found = [_percentiles(metric, runs) for metric in ("ttft", "itl")]
    over_time = [Curve(name, rates_over_time(run, _STRETCHES)) for name, run in runs]
    found.append(Chart("Output tokens over time", over_time, "tokens/s", "second", 0.0))
    for axis, across in (("rate_per_s", "requests/s"), ("in_flight", "in flight")):
        curves = [
            curve
            for name, result in named
            for curve in _over(name, [run for run in result.runs if getattr(run, axis)], axis)
        ]
        if curves:
            found.append(Chart("Time to first token under load", curves, "ms", across, 0.0))
            found.append(_throughput(named, axis, across))
    return found


def _label(name: str, run: Run, result: Result) -> str:
    if len(result.runs) == 1:
        return name or "all"
    return f"{name} {run.name}".strip()


def _percentiles(metric: str, runs: Sequence[tuple[str, Run]]) -> Chart:
    curves = []
    for name, run in runs:
        values = samples(answered(run), metric)
        if values:
            heights = np.percentile(values, _SHARES) * 1e3
            curves.append(Curve(name, list(zip(_SHARES, heights.tolist(), strict=True))))
    title = LATENCIES[metric].capitalize()
    return Chart(f"{title} by percentile", curves, "ms", "percentile", 0.0)


def _over(name: str, runs: Sequence[Run], axis: str) -> list[Curve]:
    """Return the median and the 99th percentile over a load that varies."""
    if len(runs) < 2:
        return []
    found = []
    for share, words in (("p50_s", "p50"), ("p99_s", "p99")):
        points = sorted(
            (float(getattr(run, axis)), 1e3 * getattr(spread, share))
            for run in runs
            if (spread := figures_of(run).latency.get("ttft")) is not None
        )
        found.append(Curve(f"{name} {words}".strip(), points, dots=True))
    return found


def _throughput(named: Sequence[tuple[str, Result]], axis: str, across: str) -> Chart:
    curves = [
        Curve(
            name or "output",
            sorted(
                (float(getattr(run, axis)), figures_of(run).output_tokens_per_s)
                for run in result.runs
                if getattr(run, axis)
            ),
            dots=True,
        )
        for name, result in named
    ]
    return Chart("Output tokens under load", curves, "tokens/s", across, 0.0)
