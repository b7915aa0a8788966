"""What all scored serving rows say together: errors by metric and group, the worst rows."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.predict.validation.serving.serving_score import ScoredServing
from meshwright.predict.validation.training.score_summary import error_stats

METRICS = {"throughput": "throughput_error", "tpot": "tpot_error", "ttft": "ttft_error"}
_GROUPS: dict[str, Callable[[ScoredServing], str]] = {
    "by_engine": lambda result: result.engine,
    "by_gpu": lambda result: result.gpu,
    "by_model": lambda result: result.model,
    "by_kind": lambda result: result.kind,
}
_WORST = 10


def summarize_serving(results: Sequence[ScoredServing]) -> dict[str, Any]:
    """Sum up errors of throughput, TPOT and TTFT: overall, and by engine, GPU, model and kind.

    `printed` takes only rows that print their throughput, `described` only those for which
    nothing had to be assumed, `unpaced` leaves out those whose throughput their rate sets.
    """
    scored = [result for result in results if result.skipped is None]
    found: dict[str, Any] = {
        "rows": len(results),
        "predicted": len(scored),
        "overall": _figures(scored),
        "printed": _figures([result for result in scored if not result.derived]),
        "described": _figures([result for result in scored if not result.assumed]),
        "unpaced": _figures([result for result in scored if "paced" not in result.kind]),
    }
    for name, key in _GROUPS.items():
        groups: dict[str, list[ScoredServing]] = defaultdict(list)
        for result in scored:
            groups[key(result)].append(result)
        found[name] = {group: _figures(some) for group, some in sorted(groups.items())}
    found["skipped"] = dict(Counter(result.skipped for result in results if result.skipped))
    found["worst"] = _worst(scored)
    return found


def _figures(scored: Sequence[ScoredServing]) -> dict[str, Any]:
    return {
        name: error_stats(
            [error for result in scored if (error := getattr(result, field)) is not None]
        )
        for name, field in METRICS.items()
    }


def _worst(scored: Sequence[ScoredServing]) -> list[dict[str, Any]]:
    known = [result for result in scored if result.throughput_error is not None]
    far = sorted(known, key=lambda result: -abs(result.throughput_error or 0.0))[:_WORST]
    return [
        {
            "row": result.row,
            "engine": result.engine,
            "model": result.model,
            "gpu": result.gpu,
            "kind": result.kind,
            "error": result.throughput_error,
        }
        for result in far
    ]
