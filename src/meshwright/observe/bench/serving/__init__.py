"""What a server does under load: any OpenAI-compatible one, asked and timed token by token."""

from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.result_comparison import compare_bench_runs, pair_runs
from meshwright.observe.bench.serving.serving_bench import (
    LoadPoint,
    ServingBenchConfig,
    run_serving_bench,
)
from meshwright.observe.bench.serving.serving_metrics import compute_serving_metrics, parse_slo
from meshwright.observe.bench.serving.serving_result import (
    ServingBenchResult,
    ServingBenchRun,
    load_result,
    save_result,
)

__all__ = [
    "LoadPoint",
    "RequestResult",
    "ServingBenchConfig",
    "ServingBenchResult",
    "ServingBenchRun",
    "compare_bench_runs",
    "compute_serving_metrics",
    "load_result",
    "pair_runs",
    "parse_slo",
    "run_serving_bench",
    "save_result",
]
