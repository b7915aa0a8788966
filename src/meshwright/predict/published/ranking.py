"""Whether predictions order layouts as measurements do: what a planner lives on.

Rows that have model, GPUs and batch in common and differ in their layout make a group. Rows that
cannot be told apart are one layout, measured more than once.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from meshwright.predict.published.score import Scored

FEWEST = 3
"""Layouts that a group needs."""
TOP = 2
"""How far down our list the measured best may stand."""


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """One group of layouts."""

    source: str
    name: str
    """Its model, GPUs and batch."""
    layouts: int
    spearman: float
    """Correlation of predicted and measured ranks."""
    best_at: int
    """Where the measured best stands in the predicted order, from 1."""


def ranking(results: Iterable[Scored]) -> list[Ranked]:
    """Rank every group with enough layouts."""
    groups: dict[tuple[object, ...], dict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for result in results:
        if result.error is not None and result.predicted_step_s and result.measured_step_s:
            same = groups[result.layout_key]
            same[round(result.predicted_step_s, 9)].append(result.measured_step_s)
    return [
        _ranked(key, {predicted: statistics.median(times) for predicted, times in group.items()})
        for key, group in sorted(groups.items(), key=str)
        if len(group) >= FEWEST
    ]


def ranking_summary(ranked: Sequence[Ranked]) -> dict[str, Any]:
    """Sum up how well groups are ordered."""
    if not ranked:
        return {"groups": 0}
    return {
        "groups": len(ranked),
        "median_spearman": statistics.median(group.spearman for group in ranked),
        "mean_spearman": statistics.fmean(group.spearman for group in ranked),
        "at_least_0_9": sum(group.spearman >= 0.9 for group in ranked),
        "best_in_top_2": sum(group.best_at <= TOP for group in ranked),
        "by_group": [msgspec.to_builtins(group) for group in ranked],
    }


def _ranked(key: tuple[Any, ...], times: dict[float, float]) -> Ranked:
    source, gpu, sizes, (gpus, batch, *_), *_ = key
    predicted = sorted(times)
    measured = [times[one] for one in predicted]
    return Ranked(
        source=source,
        name=f"{sizes[0]} ({sizes[3]} heads), {gpus} × {gpu}, batch {batch}",
        layouts=len(predicted),
        spearman=spearman(predicted, measured),
        best_at=1 + measured.index(min(measured)),
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
