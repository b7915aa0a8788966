"""`mw validate training`: predicted steps beside published runs, row by row."""

from pathlib import Path
from typing import Any

from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.predict.validation.training import (
    ScoredRun,
    read_runs,
    score_runs,
    summarize_scores,
)

EXAMPLES = (
    "mw validate training",
    "mw validate training --runs mine.json --json",
)


def run_validation(runs: Path) -> CommandResult:
    """Answer with every row and the summary."""
    results = score_runs(read_runs(runs))
    summed = summarize_scores(results)
    data = {"rows": [_row(result) for result in results], "summary": summed}
    views: tuple[View, ...] = (
        make_fields(_headline(results, summed)),
        *(
            _table(title, summed[key])
            for title, key in (
                ("by grade", "by_grade"),
                ("by kind of model", "by_kind"),
                ("by GPU", "by_gpu"),
                ("by source", "by_source"),
            )
        ),
        *((_worst(summed["worst"]),) if summed["worst"] else ()),
        NoteView("errors are predicted over measured step time, less one"),
    )
    overall = summed["overall"]
    quiet = (f"{overall['median_abs']:.4f}",) if overall["rows"] else ()
    return CommandResult("validate.training/2", data, views, quiet)


def _row(result: ScoredRun) -> dict[str, Any]:
    return {
        "id": result.id,
        "source": result.source,
        "gpu": result.gpu,
        "grade": result.grade,
        "predicted": {
            "step_s": result.predicted_step_s,
            "low_s": result.low_s,
            "high_s": result.high_s,
            "fits": result.fits,
            "memory_gib": result.predicted_memory_gib,
            "mfu": result.predicted_mfu,
        },
        "measured": {
            "step_s": result.measured_step_s,
            "memory_gib": result.measured_memory_gib,
            "mfu": result.measured_mfu,
        },
        "error": result.error,
        "memory_error": result.memory_error,
        "assumed": list(result.assumed),
        "doubts": list(result.caveats),
        "skipped": result.skipped,
    }


def _headline(results: list[ScoredRun], summed: dict[str, Any]) -> dict[str, object]:
    overall, memory = summed["overall"], summed["memory"]
    skipped = sum(result.skipped is not None for result in results)
    found: dict[str, object] = {"rows": f"{len(results):,}, {skipped} skipped with a reason"}
    if overall["rows"]:
        found["step time"] = (
            f"median error {overall['median_abs']:.1%}, mean {overall['mean_abs']:.1%}, "
            f"90th percentile {overall['p90_abs']:.1%}, {overall['within_10']:.0%} within 10%"
        )
        found["interval"] = f"holds for {overall['inside_interval']:.1%} of them"
    if memory["rows"]:
        found["memory"] = (
            f"median error {memory['median_abs']:.1%}, 90th percentile {memory['p90_abs']:.1%} "
            f"over {memory['rows']} rows"
        )
    ranks = summed["ranking"]
    if ranks["groups"]:
        found["ranking"] = (
            f"{ranks['groups']} groups of layouts: median Spearman {ranks['median_spearman']:.2f}, "
            f"the best in our top 2 in {ranks['best_in_top_2']}"
        )
    return found


def _worst(rows: list[dict[str, Any]]) -> View:
    shown = [(row["id"], f"{row['error']:+.0%}", row["reason"]) for row in rows]
    return make_table("row, error, reason", shown, "worst rows", right="error", wide="row, reason")


def _table(title: str, groups: dict[str, dict[str, Any]]) -> View:
    rows = [
        (
            name,
            figures["rows"],
            f"{figures['median_abs']:.1%}",
            f"{figures['p90_abs']:.1%}",
            f"{figures['bias']:+.1%}",
        )
        for name, figures in sorted(groups.items(), key=lambda item: -item[1]["rows"])
    ]
    return make_table(
        "group, rows, median, p90, bias", rows, title, right="rows, median, p90, bias", wide="group"
    )
