"""`mw validate fleet`: published statistics of clusters beside ours, one row for each."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.answer import Answer, Note, View, facts, table

if TYPE_CHECKING:
    from meshwright.observe.fleet.published import Row

EXAMPLES = (
    "mw validate fleet --traces AcmeTrace/data",
    "mw validate fleet --traces traces/ --published fleet_facts.json",
    "mw validate fleet --traces traces/ --published fleet_facts.json --json",
)


def answer(published: Path | None, traces: Path, simulated: bool = False) -> Answer:
    """Answer with every statistic and how many agree."""
    from meshwright.observe.fleet.published import compared

    rows = compared(published, traces, simulated)
    summed = summary(rows)
    data = {"rows": [msgspec.to_builtins(row) for row in rows], "summary": summed}
    if published is None:
        return Answer("validate.fleet/1", data, (_ours(rows),), (str(len(rows)),))
    differing = [row for row in rows if row.agrees is False]
    views: tuple[View, ...] = (
        facts(_headline(summed)),
        table(
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
        Note("agree: within 1 %, or the same to the digits that were printed"),
        Note("implied: worked out from other published figures, not from a trace"),
    )
    return Answer("validate.fleet/1", data, views, (str(summed["overall"]["agree"]),))


def _ours(rows: list["Row"]) -> View:
    shown = [(row.name, f"{row.ours:,.6g}", row.how) for row in rows]
    return table("statistic, ours, how", shown, "ours", right="ours", wide="statistic, how")


def summary(rows: list["Row"]) -> dict[str, Any]:
    """Count rows by how they compare, overall and by source, and the reasons for missing ones."""
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        source = "papers' text" if row.name.startswith("said:") else row.name.split(".")[0]
        by_source.setdefault(source, []).append(row)
    absent: dict[str, int] = {}
    for row in rows:
        if row.ours is None:
            absent[row.why] = absent.get(row.why, 0) + 1
    return {
        "overall": _counted(rows),
        "by_source": {name: _counted(part) for name, part in by_source.items()},
        "absent": absent,
    }


def _counted(rows: list["Row"]) -> dict[str, int]:
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


def _differing(rows: list["Row"]) -> View:
    shown = [
        (row.name, f"{row.published:,.6g}", f"{row.ours:,.6g}", _percent(row), row.why)
        for row in rows
    ]
    columns = "statistic, published, ours, difference, why"
    right = "published, ours, difference"
    return table(columns, shown, "what differs", right=right, wide="statistic, why")


def _percent(row: "Row") -> str:
    return f"{row.difference:+.1%}" if row.difference is not None else "–"
