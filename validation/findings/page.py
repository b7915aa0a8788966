"""Renew the tables of the docs page on findings: the patterns, and how well they are found.

    python -m validation.findings.page

What stands between `<!-- patterns -->` or `<!-- measured -->` and `<!-- end -->` depends on the
registry and on `result.json` only, and a test compares them.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from meshwright.observe.findings import Pattern, list_patterns
from meshwright.observe.findings.frameworks import FRAMEWORK_REMEDIES
from validation.findings.run import NEW, PatternRow, Result, Row, read_result
from validation.findings.scores import Score

PAGE = Path(__file__).resolve().parents[2] / "docs" / "analyze" / "findings.md"
_ACRONYMS = {"gemm": "GEMM"}


def pattern_tables() -> str:
    """One table for each family."""
    parts = []
    for family, own in groupby(list_patterns(), key=lambda pattern: pattern.family):
        rows = (
            (f"`{one.name}`", one.title, one.rule, one.cost_basis, _remedies(one),
             f"{100 * one.min_cost:.0f} %")
            for one in own
        )  # fmt: skip
        head = ("pattern", "what", "detected by", "cost", "remedy", "told from")
        parts.append(
            f"### {_ACRONYMS.get(family, family.capitalize())}\n\n{_table(head, rows, right=1)}"
        )
    settings = (
        (framework, f"`{name}`", remedy)
        for framework, own in FRAMEWORK_REMEDIES.items()
        for name, remedy in own.items()
    )
    columns = ("framework", "pattern", "remedy")
    parts.append(f"### Settings of frameworks\n\n{_table(columns, settings)}")
    return "\n\n".join(parts)


def _remedies(pattern: Pattern) -> str:
    """The remedy, and what replaces it elsewhere."""
    others = (("without training", pattern.serving_remedy), ("on AMD", pattern.rocm_remedy))
    more = (f"*{where}*: {remedy}" for where, remedy in others if remedy)
    return "<br>".join((pattern.remedy, *more))


def measured_tables(result: Result) -> str:
    """What was measured, from the set that says most to the one that says least."""
    return "\n\n".join(
        [
            "**Real traces labelled by hand**",
            _scores(result.labelled),
            "**Faults planted in real timelines**",
            _scores(result.planted),
            "**Faults planted in simulated timelines**",
            _scores(result.simulated),
            "**Each pattern**, over all planted faults, with the least and the most that was told "
            "of the cost that was planted, and over all labels:",
            _each(result.patterns),
            "**False alarms of the statistical patterns.** Of 1000 series of step times without a "
            "fault, so many are told to hold outliers or a lasting change:",
            _table(
                ("noise", "steps", "`step-outliers`", "`step-time-change`"),
                (
                    (one.noise, str(one.steps), f"{one.outliers:.1%}", f"{one.changes:.1%}")
                    for one in result.steps
                ),
                right=3,
            ),
            "Of clean simulated jobs of ten steps, so many are told to have anything:",
            _table(
                ("kernels vary by", "ranks", "jobs", "told"),
                (
                    (one.noise, str(one.ranks), str(one.jobs),
                     ", ".join(f"{count} `{name}`" for name, count in sorted(one.told.items()))
                     or "nothing")
                    for one in result.jobs
                ),
            ),
        ]
    )  # fmt: skip


def _scores(rows: Sequence[Row]) -> str:
    cells = [(row.where, *_score(row.score)) for row in rows]
    new = [row for row in rows if row.where.endswith(NEW)]
    for name, some in (("**new, together**", new), ("**all**", rows)):
        if some:
            columns = zip(*(row.score for row in some), strict=True)
            cells.append((name, *_score(Score(*map(sum, columns)))))
    head = ("where", "there", "false alarms", "missed", "precision", "recall")
    return _table(head, cells, right=5)


def _score(score: Score) -> tuple[str, ...]:
    counts = (score.there, score.false, score.missed)
    return (*map(str, counts), _rate(score.precision), _rate(score.recall))


def _each(rows: Iterable[PatternRow]) -> str:
    head = ("pattern", "planted", "precision", "recall", "told / true cost", "labels", "precision",
            "recall")  # fmt: skip
    cells = (
        (
            f"`{row.name}`", str(row.planted.there), _rate(row.planted.precision),
            _rate(row.planted.recall),
            f"{row.told.least:.2f}–{row.told.most:.2f}" if row.told else "–",
            str(row.labelled.there), _rate(row.labelled.precision), _rate(row.labelled.recall),
        )
        for row in rows
    )  # fmt: skip
    return _table(head, cells, right=7)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table whose last `right` columns hold numbers."""
    rule = ["---"] * (len(head) - right) + ["---:"] * right
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def renewed(text: str, result: Result) -> str:
    """The page with its tables made anew."""
    for mark, body in (("patterns", pattern_tables()), ("measured", measured_tables(result))):
        before, _, rest = text.partition(f"<!-- {mark} -->")
        _, _, after = rest.partition("<!-- end -->")
        text = f"{before}<!-- {mark} -->\n\n{body}\n\n<!-- end -->{after}"
    return text


def main() -> None:
    """Write the page."""
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), read_result()), encoding="utf-8")


if __name__ == "__main__":
    main()
