"""Renew the tables of the docs page on communication costs from the code and the data.

    python -m validation.collectives.page

Everything between `<!-- name -->` and `<!-- end -->` on the page is written here, and a test
compares the two, so the page cannot say what the code does not do.
"""

import re
import sys
from functools import cache
from pathlib import Path
from typing import get_args

from meshwright.predict.network.fabric import corrections
from validation.collectives.fit import By, cross_validation
from validation.collectives.rows import RUNS, read_rows
from validation.collectives.score import Scored, grouped, score, summary, tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "communication-costs.md"
_WHERE = {
    "call": "once per call",
    "hop": "each hop between units",
    "message": "each message posted",
}


def constants() -> str:
    """Write the fitted constants as a table."""
    lines = [
        "| kind of link | `delay_us` | where it falls | `efficiency` | rows fitted |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for name, value in corrections().items():
        where = _WHERE[value.per] if value.delay_us else "–"
        stand_in = f"none: as {value.like}" if value.like else "none: NCCL's own figures"
        rows = str(value.rows) if value.rows else stand_in
        lines.append(f"| {name} | {value.delay_us:g} | {where} | {value.efficiency:g} | {rows} |")
    return "\n".join(lines)


def halves() -> str:
    """Write the errors of the half that was fitted and of the half that was not."""
    lines = [
        "| constants fitted to half of the | scored on | ≥ 1 MiB | < 1 MiB | within 25 % |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for by in get_args(By):
        for name, found in _crossed(by).items():
            group = grouped(found)
            large, small = group.large_median or 0.0, group.small_median or 0.0
            half = f"{by}s | the {name}"
            lines.append(f"| {half} | {large:.1%} | {small:.1%} | {group.within_25:.0%} |")
    return "\n".join(lines)


def held_out() -> str:
    """Write the errors on systems that the constants never saw, by fabric and collective."""
    return tables(summary(_crossed("system")["held-out half"]))


def errors() -> str:
    """Write the errors of the constants in use."""
    return tables(summary(score(read_rows(RUNS))))


@cache
def _crossed(by: By) -> dict[str, list[Scored]]:
    return cross_validation(read_rows(RUNS), corrections(), by)


def renewed(page: str) -> str:
    """Return a page with its tables written anew."""
    parts = {
        "constants": constants(),
        "halves": halves(),
        "held-out": held_out(),
        "errors": errors(),
    }
    for name, text in parts.items():
        pattern = re.compile(rf"<!-- {name} -->\n.*?<!-- end -->", re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"the page has no single place for {name}")
        page = pattern.sub(lambda _, n=name, t=text: f"<!-- {n} -->\n\n{t}\n\n<!-- end -->", page)  # type: ignore[misc]
    return page


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"renewed {PAGE.name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
