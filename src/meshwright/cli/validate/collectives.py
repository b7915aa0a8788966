"""`mw validate collectives`: predicted collectives beside published benchmarks, row by row."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.predict.validation.collectives import (
    CollectiveErrorGroup,
    CollectiveErrorSummary,
    PredictionMethod,
    ScoredCollective,
    TuningComparison,
    compare_tuning_log,
    read_sweep_rows,
    read_tuning_log,
    score_collectives,
    summarize_collectives,
)

EXAMPLES = (
    "mw validate collectives",
    "mw validate collectives --runs mine.json --json",
    "mw validate collectives --by simulation",
)
_WORST = 10


def run_validation(runs: Path, tuning: Path | None, by: PredictionMethod) -> CommandResult:
    """Answer with every row, the summary, and NCCL's cost model beside its own log."""
    results = score_collectives(read_sweep_rows(runs), by)
    summed = summarize_collectives(results)
    log = None if tuning is None else compare_tuning_log(read_tuning_log(tuning))
    data: dict[str, Any] = {
        "by": by,
        "rows": msgspec.to_builtins(results),
        "summary": {**msgspec.to_builtins(summed), "worst": _worst(results)},
        "tuning": None if log is None else _tuning(log),
    }
    worst = data["summary"]["worst"]
    views: tuple[View, ...] = (
        make_fields(_headline(results, summed, log)),
        _table("by kind of link", summed.by_fabric),
        _table("by collective", summed.by_collective),
        *((_worst_table(worst),) if worst else ()),
        NoteView("errors are predicted over measured time, less one; medians leave out the sign"),
    )
    quiet = [
        f"{median:.4f}"
        for median in (summed.overall.large_median, summed.overall.small_median)
        if median is not None
    ]
    return CommandResult("validate.collectives/1", data, views, tuple(quiet))


def _headline(
    results: Sequence[ScoredCollective],
    summed: CollectiveErrorSummary,
    log: Sequence[TuningComparison] | None,
) -> dict[str, object]:
    skipped = sum(summed.skipped.values())
    overall = summed.overall
    found: dict[str, object] = {"rows": f"{len(results):,}, {skipped} skipped with a reason"}
    if overall.large_median is not None:
        found["from 1 MiB on"] = f"median error {overall.large_median:.1%} over {overall.large}"
    if overall.small_median is not None:
        found["below 1 MiB"] = f"median error {overall.small_median:.1%} over {overall.small}"
    if overall.rows:
        found["within 25%"] = f"{overall.within_25:.0%} of them"
    if log is not None:
        tuned = _tuning(log)
        found["NCCL's tuning log"] = f"{tuned['exact']} of {tuned['entries']} entries as printed"
    return found


def _tuning(log: Sequence[TuningComparison]) -> dict[str, Any]:
    """Say how many entries of NCCL's log the cost model repeats, and which it does not."""
    exact = sum(entry.exact for entry in log)
    return {
        "entries": len(log),
        "exact": exact,
        "share": exact / max(1, len(log)),
        "missed": [msgspec.to_builtins(entry) for entry in log if not entry.exact],
    }


def _worst(results: Sequence[ScoredCollective]) -> list[dict[str, Any]]:
    scored = [result for result in results if result.error is not None]
    far = sorted(scored, key=lambda result: -abs(result.error or 0.0))[:_WORST]
    return [
        {
            "row": result.row,
            "system": result.system,
            "collective": result.collective,
            "size_bytes": result.size_bytes,
            "error": result.error,
        }
        for result in far
    ]


def _worst_table(rows: Sequence[Mapping[str, Any]]) -> View:
    shown = [
        (row["system"], row["collective"], row["size_bytes"], f"{row['error']:+.0%}")
        for row in rows
    ]
    return make_table(
        "system, collective, bytes, error",
        shown,
        "worst rows",
        right="bytes, error",
        wide="system",
    )


def _table(title: str, groups: Mapping[str, CollectiveErrorGroup]) -> View:
    rows = [
        (
            name,
            group.large,
            _percent(group.large_median),
            group.small,
            _percent(group.small_median),
            f"{group.within_25:.0%}",
        )
        for name, group in sorted(groups.items(), key=lambda item: -item[1].rows)
    ]
    columns = "group, ≥ 1 MiB, median, < 1 MiB, median below, within 25%"
    return make_table(
        columns, rows, title, right="≥ 1 MiB, median, < 1 MiB, median below, within 25%",
        wide="group",
    )  # fmt: skip


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
