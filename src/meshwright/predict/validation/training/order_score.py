"""Whether predictions order layouts as measurements do: what a planner lives on.

Rows that have model, GPUs and batch in common and differ in their layout make a group; those of
one layout and software are one, measured more than once.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from meshwright.predict.validation.training.run_score import ScoredRun

MIN_LAYOUTS = 3
"""Layouts that a group needs."""
TOP_K = 2
"""How far down our list the measured best may stand."""


class OrderScore(msgspec.Struct, frozen=True, kw_only=True):
    """One group of layouts."""

    source: str
    name: str
    """Its model, GPUs and batch."""
    layouts: int
    spearman: float
    """Correlation of predicted and measured ranks."""
    measured_best_rank: int
    """Where the measured best stands in the predicted order, from 1."""


def score_order(results: Iterable[ScoredRun]) -> list[OrderScore]:
    """Rank every group with enough layouts."""
    groups: dict[tuple[object, ...], dict[object, list[ScoredRun]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for result in results:
        if result.predicted_step_s and result.measured_step_s:
            groups[result.layout_key][result.setup].append(result)
    return [
        _ranked(key, [_times(same) for same in group.values()])
        for key, group in sorted(groups.items(), key=str)
        if len(group) >= MIN_LAYOUTS
    ]


def _times(same: list[ScoredRun]) -> tuple[float, float]:
    """Return the predicted and the median measured time of rows with one layout."""
    measured = statistics.median(result.measured_step_s or 0.0 for result in same)
    return same[0].predicted_step_s or 0.0, measured


def summarize_order(ranked: Sequence[OrderScore]) -> dict[str, Any]:
    """Sum up how well groups are ordered."""
    if not ranked:
        return {"groups": 0}
    return {
        "groups": len(ranked),
        "median_spearman": statistics.median(group.spearman for group in ranked),
        "mean_spearman": statistics.fmean(group.spearman for group in ranked),
        "at_least_0_9": sum(group.spearman >= 0.9 for group in ranked),
        "best_in_top_2": sum(group.measured_best_rank <= TOP_K for group in ranked),
        "by_group": [msgspec.to_builtins(group) for group in ranked],
    }


def _ranked(key: tuple[Any, ...], times: list[tuple[float, float]]) -> OrderScore:
    source, gpu, sizes, (gpus, batch, *_), *_ = key
    predicted, measured = zip(*times, strict=True)
    best = predicted[measured.index(min(measured))]
    return OrderScore(
        source=source,
        name=f"{sizes[0]} ({sizes[3]} heads), {gpus} × {gpu}, batch {batch}",
        layouts=len(predicted),
        spearman=spearman(predicted, measured),
        measured_best_rank=1 + sum(other < best * (1 - 1e-9) for other in predicted),
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the ranks of two lists; 0 where either has only one rank."""
    ranks = _ranks(one), _ranks(other)
    if any(min(some) == max(some) for some in ranks):
        return 0.0
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    """Rank values from 0; equal ones share the mean of their ranks."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]
