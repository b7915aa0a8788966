"""Renew the tables of the guide's page on fleet patterns: what there is, and how well it is found.

    python -m validation.fleet_patterns.page

What stands between `<!-- patterns -->` or `<!-- measured -->` and `<!-- end -->` depends on the
registry and on `result.json` only, and a test compares them.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from meshwright.fleet.patterns import list_patterns
from validation.fleet_patterns.run import Result, Row, read_result

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "fleet-patterns.md"


def pattern_tables() -> str:
    """One table for each family."""
    parts = []
    for family, own in groupby(list_patterns(), key=lambda one: one.family):
        rows = ((f"`{one.name}`", one.title, one.rule, one.cost_basis, one.remedy, one.owner)
                for one in own)  # fmt: skip
        head = ("pattern", "what", "detected by", "cost", "remedy", "owner")
        parts.append(f"### {family.capitalize()}\n\n{_table(head, rows)}")
    return "\n\n".join(parts)


def measured_tables(result: Result) -> str:
    """Precision and recall of each pattern, and of fixed bounds beside statistics."""
    true, false, missed = (
        sum(getattr(row, name) for row in result.rows) for name in ("true", "false", "missed")
    )
    alarms = sum(row.sound_false for row in result.rows)
    told = ", ".join(f"{row.sound_false} `{row.name}`" for row in result.rows if row.sound_false)
    rows = [
        (f"`{row.name}`", str(row.true + row.missed), _share(row.true, row.true + row.false),
         _share(row.true, row.true + row.missed), str(row.false), _costs(row))
        for row in result.rows
    ]  # fmt: skip
    head = ("pattern", "planted", "precision", "recall", "false alarms", "told / planted hours")
    found = {row.name: row for row in result.rows}
    against = [
        (f"`{one.pattern}`", one.rule,
         _share(found[one.pattern].true, found[one.pattern].true + found[one.pattern].missed),
         str(found[one.pattern].false), _share(one.true, one.true + one.missed), str(one.false))
        for one in result.bounds
    ]  # fmt: skip
    columns = ("pattern", "fixed bound instead", "recall", "false alarms", "recall of the bound",
               "its false alarms")  # fmt: skip
    return "\n\n".join(
        [
            f"{result.fleets} fleets of {result.jobs:,} jobs together, every fault planted once in "
            f"each: of {true + missed:,} faults {true:,} are found "
            f"({_share(true, true + missed)}), with {false} false alarms "
            f"(precision {_share(true, true + false)}).",
            _table(head, rows, right=5),
            f"In {result.sound_fleets} fleets without any fault, {result.sound_jobs:,} jobs, "
            f"so many false alarms were told: {alarms}" + (f" ({told})." if told else "."),
            "**The same fleets seen by a poorer monitor**:",
            _table(
                ("what is missing", "recall", "precision", "patterns found"),
                (
                    (
                        one.what,
                        _share(one.true, one.true + one.missed),
                        _share(one.true, one.true + one.false),
                        f"{one.patterns} of {len(rows)}",
                    )
                    for one in result.poorer
                ),
                right=3,
            ),
            "**Statistics against fixed bounds**, on the same fleets:",
            _table(columns, against, right=4),
        ]
    )


def renewed(text: str, result: Result) -> str:
    """The page with fresh tables."""
    for name, body in (("patterns", pattern_tables()), ("measured", measured_tables(result))):
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        found = mark.search(text)
        if found is not None:
            fresh = f"{found[1]}\n{body}\n\n{found[2]}"
            text = text[: found.start()] + fresh + text[found.end() :]
    return text


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _costs(row: Row) -> str:
    if row.median is None:
        return ""
    return f"{row.median:.2f} ({row.least:.2f} to {row.most:.2f})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table whose last columns stand to the right."""
    left = len(head) - right
    lines = [
        "| " + " | ".join(head) + " |",
        "| " + " | ".join(["---"] * left + ["---:"] * right) + " |",
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), read_result()), encoding="utf-8")
