"""`mw validate fleet`: published statistics of clusters beside ours, one row for each."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table

if TYPE_CHECKING:
    from meshwright.fleet.validation import StatisticComparison

EXAMPLES = (
    "mw validate fleet --traces AcmeTrace/data",
    "mw validate fleet --traces traces/ --published fleet_facts.json",
    "mw validate fleet --traces traces/ --published fleet_facts.json --json",
)


def run_validation(published: Path | None, traces: Path, simulated: bool = False) -> CommandResult:
    """Answer with every statistic and how many agree."""
    from meshwright.fleet.validation import compare_statistics

    rows = compare_statistics(published, traces, simulated)
    summed = summarize_rows(rows)
    data = {"rows": [msgspec.to_builtins(row) for row in rows], "summary": summed}
    if published is None:
        return CommandResult("validate.fleet/2", data, (_ours(rows),), (str(len(rows)),))
    differing = [row for row in rows if row.agrees is False]
    views: tuple[View, ...] = (
        make_fields(_headline(summed)),
        make_table(
            "of, agree, of these implied, differ, other data, not computed",
            (
                (
                    name,
                    part["agree"],
                    part["implied"],
                    part["differ"],
                    part["other"],
                    part["absent"],
                )
                for name, part in summed["by_source"].items()
            ),
            "by source",
            right="agree, of these implied, differ, other data, not computed",
        ),
        *((_differing(differing),) if differing else ()),
        NoteView("agree: within 1 %, or the same to the digits that were printed"),
        NoteView("implied: worked out from other published figures, not from a trace"),
    )
    return CommandResult("validate.fleet/2", data, views, (str(summed["overall"]["agree"]),))


def _ours(rows: list["StatisticComparison"]) -> View:
    shown = [(row.name, f"{row.ours:,.6g}", row.method) for row in rows]
    return make_table("statistic, ours, how", shown, "ours", right="ours", wide="statistic, how")


def summarize_rows(rows: list["StatisticComparison"]) -> dict[str, Any]:
    """Count rows by how they compare, overall and by source, and the reasons for missing ones."""
    by_source: dict[str, list[StatisticComparison]] = {}
    for row in rows:
        source = "papers' text" if row.name.startswith("said:") else row.name.split(".")[0]
        by_source.setdefault(source, []).append(row)
    absent: dict[str, int] = {}
    for row in rows:
        if row.ours is None:
            absent[row.reason] = absent.get(row.reason, 0) + 1
    return {
        "overall": _counted(rows),
        "by_source": {name: _counted(part) for name, part in by_source.items()},
        "absent": absent,
    }


def _counted(rows: list["StatisticComparison"]) -> dict[str, int]:
    return {
        "rows": len(rows),
        "agree": sum(row.agrees is True for row in rows),
        "implied": sum(row.agrees is True and row.basis == "figures" for row in rows),
        "differ": sum(row.agrees is False for row in rows),
        "other": sum(row.agrees is None and row.ours is not None for row in rows),
        "absent": sum(row.ours is None for row in rows),
    }


def _headline(summed: dict[str, Any]) -> dict[str, object]:
    found = summed["overall"]
    judged = found["agree"] + found["differ"]
    return {
        "published statistics": f"{found['rows']:,}",
        "of the same data": f"{found['agree']:,} of {judged:,} agree",
        "of other data": f"{found['other']:,} are shown, not judged",
        "not computed": f"{found['absent']:,}, each with a reason",
    }


def _differing(rows: list["StatisticComparison"]) -> View:
    shown = [
        (row.name, f"{row.published:,.6g}", f"{row.ours:,.6g}", _percent(row), row.reason)
        for row in rows
    ]
    columns = "statistic, published, ours, difference, why"
    right = "published, ours, difference"
    return make_table(columns, shown, "what differs", right=right, wide="statistic, why")


def _percent(row: "StatisticComparison") -> str:
    return f"{row.difference:+.1%}" if row.difference is not None else "–"
