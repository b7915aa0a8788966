"""Pictures of a server under load: latencies by percentile, over rates, and tokens over time."""

from collections.abc import Sequence

import numpy as np

from meshwright.cli.render.files import write_text
from meshwright.cli.render.line_chart import ChartLine, LineChart, draw_line_charts
from meshwright.errors import Problem
from meshwright.observe.bench.serving.serving_metrics import (
    collect_latency_samples,
    compute_serving_metrics,
    compute_throughput_over_time,
    select_completed_requests,
)
from meshwright.observe.bench.serving.serving_result import ServingBenchResult, ServingBenchRun
from meshwright.predict.serving.sim.latency import LATENCIES
from meshwright.spec.field_checks import raise_problems

_SHARES = (*range(99), 98.5, 99)
"""The last hundredth is left out: one straggler would flatten all the rest."""
_STRETCHES = 60


def write_plot(path: str, named: Sequence[tuple[str, ServingBenchResult]]) -> None:
    """Draw one result, or several in the same axes."""
    raise_problems(find_plot_problems(path))
    write_text(path, draw_line_charts(build_charts(named)))


def find_plot_problems(path: str) -> list[Problem]:
    """Return what keeps a picture from having a name."""
    if path.lower().endswith(".svg"):
        return []
    return [Problem("--plot", f"{path} is drawn as SVG", "let its name end in .svg")]


def build_charts(named: Sequence[tuple[str, ServingBenchResult]]) -> list[LineChart]:
    """Return the charts: those over rates only where several were measured."""
    runs = [(_label(name, run, result), run) for name, result in named for run in result.runs]
    found = [_percentiles(metric, runs) for metric in ("ttft", "itl")]
    over_time = [
        ChartLine(name, compute_throughput_over_time(run, _STRETCHES)) for name, run in runs
    ]
    found.append(LineChart("Output tokens over time", over_time, "tokens/s", "second", 0.0))
    for axis, across in (("request_rate", "requests/s"), ("max_concurrency", "in flight")):
        curves = [
            curve
            for name, result in named
            for curve in _over(name, [run for run in result.runs if getattr(run, axis)], axis)
        ]
        if curves:
            found.append(LineChart("Time to first token under load", curves, "ms", across, 0.0))
            found.append(_throughput(named, axis, across))
    return found


def _label(name: str, run: ServingBenchRun, result: ServingBenchResult) -> str:
    if len(result.runs) == 1:
        return name or "all"
    return f"{name} {run.name}".strip()


def _percentiles(metric: str, runs: Sequence[tuple[str, ServingBenchRun]]) -> LineChart:
    curves = []
    for name, run in runs:
        values = collect_latency_samples(select_completed_requests(run), metric)
        if values:
            heights = np.percentile(values, _SHARES) * 1e3
            curves.append(ChartLine(name, list(zip(_SHARES, heights.tolist(), strict=True))))
    title = LATENCIES[metric].capitalize()
    return LineChart(f"{title} by percentile", curves, "ms", "percentile", 0.0)


def _over(name: str, runs: Sequence[ServingBenchRun], axis: str) -> list[ChartLine]:
    """Return the median and the 99th percentile over a load that varies."""
    if len(runs) < 2:
        return []
    found = []
    for share, words in (("p50_s", "p50"), ("p99_s", "p99")):
        points = sorted(
            (float(getattr(run, axis)), 1e3 * getattr(spread, share))
            for run in runs
            if (spread := compute_serving_metrics(run).latency.get("ttft")) is not None
        )
        found.append(ChartLine(f"{name} {words}".strip(), points, show_points=True))
    return found


def _throughput(
    named: Sequence[tuple[str, ServingBenchResult]], axis: str, across: str
) -> LineChart:
    curves = [
        ChartLine(
            name or "output",
            sorted(
                (float(getattr(run, axis)), compute_serving_metrics(run).output_tokens_per_s)
                for run in result.runs
                if getattr(run, axis)
            ),
            show_points=True,
        )
        for name, result in named
    ]
    return LineChart("Output tokens under load", curves, "tokens/s", across, 0.0)
