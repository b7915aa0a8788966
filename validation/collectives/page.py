"""Renew the tables of the docs page on communication costs from the code and the data.

    python -m validation.collectives.page

Everything between `<!-- name -->` and `<!-- end -->` on the page is written here, and a test
compares the two, so the page cannot say what the code does not do.
"""

import re
import sys
from functools import cache
from pathlib import Path
from statistics import median
from typing import get_args

from meshwright.predict.network.collective_cost import OPS
from meshwright.predict.network.link_corrections import load_corrections
from meshwright.predict.validation.collectives import (
    CollectiveErrorGroup,
    CollectiveErrorSummary,
    ScoredCollective,
    compare_tuning_log,
    read_sweep_rows,
    read_tuning_log,
    score_collectives,
    summarize_collectives,
    summarize_group,
)
from validation.collectives.fit import By, held_out, markdown
from validation.collectives.pack import RUNS

LOG = Path(__file__).with_name("nccl_tuning_h100_2_27_5.json")
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
    for name, value in load_corrections().items():
        where = _WHERE[value.per] if value.delay_us else "–"
        stand_in = f"none: as {value.like}" if value.like else "none: NCCL's own figures"
        rows = str(value.rows) if value.rows else stand_in
        lines.append(f"| {name} | {value.delay_us:g} | {where} | {value.efficiency:g} | {rows} |")
    return "\n".join(lines)


def left_out() -> str:
    """Write the errors of the constants in use beside those on what constants never saw."""
    lines = [
        "| constants fitted to | ≥ 1 MiB | < 1 MiB | within 25 % |",
        "| --- | ---: | ---: | ---: |",
        _line("all rows", summarize_group(_scored())),
    ]
    lines += [_line(f"all other {by}s", summarize_group(_held_out(by))) for by in get_args(By)]
    return "\n".join(lines)


def _line(name: str, group: CollectiveErrorGroup) -> str:
    large, small = group.large_median or 0.0, group.small_median or 0.0
    return f"| {name} | {large:.1%} | {small:.1%} | {group.within_25:.0%} |"


def left_out_by(by: By) -> str:
    """Write the errors on systems (or sources) left out, by kind of link and by collective."""
    return markdown(summarize_collectives(_held_out(by)))


def errors() -> str:
    """Write the errors of the constants in use."""
    return markdown(_summed())


def beside() -> str:
    """Write the errors of what is no collective of NCCL, and how much of NCCL's log is repeated."""
    log = compare_tuning_log(read_tuning_log(LOG))
    experts = [
        row for row in score_collectives(read_sweep_rows(RUNS)) if row.collective.startswith("ep_")
    ]
    off = [abs(row.error) for row in experts if row.error is not None]
    return "\n".join(
        [
            f"- NCCL 2.27.5's tuning log: {sum(entry.exact for entry in log)} of {len(log)} entries"
            " agree (0.1 µs; 1.2 %).",
            f"- Dispatch and combine of experts (DeepEP, UCCL-EP): median error {median(off):.1%}"
            f" over {len(off)} rows.",
        ]
    )


@cache
def _summed() -> CollectiveErrorSummary:
    return summarize_collectives(_scored())


@cache
def _scored() -> list[ScoredCollective]:
    """Return the rows of NCCL's collectives: those that the constants are about."""
    return [
        row
        for row in score_collectives(read_sweep_rows(RUNS))
        if row.collective in OPS and row.error is not None
    ]


@cache
def _held_out(by: By) -> list[ScoredCollective]:
    return held_out(read_sweep_rows(RUNS), load_corrections(), by)


def renewed(page: str) -> str:
    """Return a page with its tables written anew."""
    parts = {
        "constants": constants(),
        "left-out": left_out(),
        "left-out-systems": left_out_by("system"),
        "left-out-sources": left_out_by("source"),
        "errors": errors(),
        "beside": beside(),
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
