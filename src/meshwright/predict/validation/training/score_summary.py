"""What all scored rows say together: errors by group, how often intervals hold, the worst rows."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.predict.validation.training.order_score import score_order, summarize_order
from meshwright.predict.validation.training.run_score import ScoredRun

_GROUPS: dict[str, Callable[[ScoredRun], str]] = {
    "by_source": lambda result: result.source,
    "by_gpu": lambda result: result.gpu,
    "by_grade": lambda result: result.grade,
    "by_kind": lambda result: "moe" if result.moe else "dense",
}


def summarize_scores(results: Sequence[ScoredRun]) -> dict[str, Any]:
    """Sum up errors overall, by source, GPU, grade and kind of model, and name the worst rows."""
    scored = [result for result in results if result.error is not None]
    worst = sorted(scored, key=lambda result: -abs(result.error or 0.0))[:10]
    return {
        "overall": _figures(scored),
        **{name: _grouped(scored, key) for name, key in _GROUPS.items()},
        "memory": error_stats([r.memory_error for r in results if r.memory_error is not None]),
        "ranking": summarize_order(score_order(scored)),
        "worst": [
            {
                "id": result.id,
                "error": result.error,
                "reason": "; ".join(result.caveats) or "unexplained",
            }
            for result in worst
        ],
    }


def _grouped(scored: list[ScoredRun], key: Callable[[ScoredRun], str]) -> dict[str, Any]:
    groups: dict[str, list[ScoredRun]] = defaultdict(list)
    for result in scored:
        groups[key(result)].append(result)
    return {name: _figures(group) for name, group in sorted(groups.items())}


def _figures(scored: list[ScoredRun]) -> dict[str, float | int | None]:
    figures = error_stats([result.error for result in scored if result.error is not None])
    if scored:
        figures["inside_interval"] = sum(map(_inside, scored)) / len(scored)
    return figures


def _inside(result: ScoredRun) -> bool:
    measured, low, high = result.measured_step_s, result.low_s, result.high_s
    return measured is not None and low is not None and high is not None and low <= measured <= high


def error_stats(errors: list[float]) -> dict[str, float | int | None]:
    """Describe relative errors."""
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return {"rows": 0}
    return {
        "rows": len(sizes),
        "median_abs": statistics.median(sizes),
        "mean_abs": statistics.fmean(sizes),
        "p90_abs": sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)],
        "within_10": sum(size <= 0.1 for size in sizes) / len(sizes),
        "bias": statistics.median(errors),
    }
