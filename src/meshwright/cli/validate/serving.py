"""`mw validate serving`: predicted serving beside published runs, row by row."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.render.progress import Advance, show_progress
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.predict.validation.serving import read_runs, score_serving, summarize_serving

EXAMPLES = (
    "mw validate serving --runs runs.json",
    "mw validate serving --runs runs.json --json",
)
_TABLES = (
    ("by engine", "by_engine"),
    ("by kind of load", "by_kind"),
    ("by GPU", "by_gpu"),
    ("by model", "by_model"),
)


def run_validation(runs: Path, *, silent: bool = False) -> CommandResult:
    """Answer with every row and the summary; unless `silent`, a bar shows how far it is."""
    rows = read_runs(runs)
    if not rows:
        fix = "give a list with one object for each published run"
        raise InputError([Problem(str(runs), "there are no rows", fix)])
    with show_progress("predicting", len(rows), quiet=silent) as advance:
        results = score_serving(_counted(rows, advance))
    summed = summarize_serving(results)
    data = {"rows": [_row(msgspec.to_builtins(result)) for result in results], "summary": summed}
    views: tuple[View, ...] = (
        make_fields(_headline(summed)),
        *((_skipped(summed["skipped"]),) if summed["skipped"] else ()),
        *(_table(title, summed[key]) for title, key in _TABLES),
        *((_worst(summed["worst"]),) if summed["worst"] else ()),
        NoteView(
            "errors are predicted over measured, less one; throughput that a row does not print is"
        ),
        NoteView("worked out from its latencies or its requests per second"),
    )
    overall = summed["overall"]["throughput"]
    quiet = (f"{overall['median_abs']:.4f}",) if overall["rows"] else ()
    return CommandResult("validate.serving/1", data, views, quiet)


def _counted(rows: Sequence[Any], advance: Advance) -> Iterator[Any]:
    for row in rows:
        yield row
        advance(1)


def _row(result: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its figures in three groups."""
    names = ("output_tok_s", "ttft_s", "tpot_s")
    kept = {
        name: value
        for name, value in result.items()
        if not name.startswith(("predicted_", "measured_")) and not name.endswith("_error")
    }
    return {
        **kept,
        "predicted": {name: result[f"predicted_{name}"] for name in names},
        "measured": {name: result[f"measured_{name}"] for name in names},
        "error": {name: result[f"{name}_error"] for name in ("throughput", "ttft", "tpot")},
    }


def _headline(summed: dict[str, Any]) -> dict[str, object]:
    skipped = summed["rows"] - summed["predicted"]
    found: dict[str, object] = {"rows": f"{summed['rows']:,}, {skipped} skipped with a reason"}
    names = (("throughput", "throughput"), ("tpot", "time per token"), ("ttft", "first token"))
    for name, title in names:
        figures = summed["overall"][name]
        if figures["rows"]:
            found[title] = (
                f"median error {figures['median_abs']:.1%}, 90th percentile "
                f"{figures['p90_abs']:.1%}, bias {figures['bias']:+.1%} over {figures['rows']:,}"
            )
    printed = summed["printed"]["throughput"]
    if printed["rows"]:
        found["printed throughput"] = (
            f"median error {printed['median_abs']:.1%} over {printed['rows']:,}"
        )
    return found


def _skipped(reasons: dict[str, int]) -> View:
    """Lay out why rows were skipped; reasons that differ in names and numbers alone are one."""
    groups: dict[str, Counter[str]] = {}
    for reason, count in reasons.items():
        first = reason.partition("\n")[0].partition(" (fix:")[0]
        alike = re.sub(r"\d[\d,.]*", "N", re.sub(r"'.*'|\".*\"", "…", first))
        groups.setdefault(alike, Counter())[first] += count
    rows = [
        (next(iter(own)) if len(own) == 1 else alike, own.total()) for alike, own in groups.items()
    ]
    rows.sort(key=lambda row: -row[1])
    return make_table("reason, rows", rows, "skipped", right="rows", wide="reason")


def _table(title: str, groups: dict[str, dict[str, Any]]) -> View:
    rows = []
    for name, figures in sorted(groups.items(), key=lambda item: -item[1]["throughput"]["rows"]):
        made = figures["throughput"]
        if made["rows"]:
            rows.append(
                (
                    name,
                    made["rows"],
                    f"{made['median_abs']:.1%}",
                    f"{made['p90_abs']:.1%}",
                    f"{made['bias']:+.1%}",
                    _percent(figures["tpot"]),
                    _percent(figures["ttft"]),
                )
            )
    columns = "group, rows, median, p90, bias, TPOT, TTFT"
    right = "rows, median, p90, bias, TPOT, TTFT"
    return make_table(columns, rows, title, right=right, wide="group")


def _percent(figures: dict[str, Any]) -> str:
    return f"{figures['median_abs']:.1%}" if figures["rows"] else "–"


def _worst(rows: list[dict[str, Any]]) -> View:
    shown = [
        (row["row"], row["engine"], row["model"], row["gpu"], row["kind"], f"{row['error']:+.0%}")
        for row in rows
    ]
    columns = "row, engine, model, GPU, kind, error"
    return make_table(columns, shown, "worst rows", right="row, error", wide="engine, model")
