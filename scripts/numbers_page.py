"""Writes docs/numbers.md from the dated results of benchmarks/results.

The page depends on those files only, so a test can say whether it is up to date.

    python -m scripts.numbers_page           writes the page
    python -m scripts.numbers_page --check   exits 1 where the page is out of date
"""

import sys
from itertools import groupby
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.result import Figure, Measured, Result, met, pretty, read_all

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "numbers.md"
RESULTS = ROOT / "benchmarks" / "results"
LONGEST = 40
"""Rows of one table beyond which a reader is lost."""

_HEAD = """\
# The numbers

<!-- Written by `make bench` from benchmarks/results; edits by hand are lost. -->

Every figure here was measured by a benchmark in `benchmarks/`, on the machine named below it. The
newest result of each is shown; where an older one from the same kind of machine exists, it stands
beside it. Run `make bench` to measure your own machine.
"""


def page(results: list[Result]) -> str:
    """The whole page, from results sorted by name and then date."""
    sections = [
        _section(list(group)) for _, group in groupby(results, key=lambda result: result.name)
    ]
    return "\n".join([_HEAD, *(sections or ["Nothing has been measured yet.\n"])])


def _section(history: list[Result]) -> str:
    newest = history[-1]
    earlier = [result for result in history[:-1] if result.machine.cpu == newest.machine.cpu]
    before = earlier[-1] if earlier else None
    lines = [f"## {newest.name}", "", newest.question, "", *_table(newest, before), ""]
    # What was measured, as data, stays in the file.
    words = newest.measured.notes.partition("measured: {")[0].strip()
    if words:
        lines += [words, ""]
    lines += [
        f"Measured {newest.date} on {_machine(newest.machine)}; the benchmark ran"
        f" {pretty(newest.wall_s)} s with a peak of"
        f" {newest.peak_memory_bytes / 2**30:.2f} GiB resident.",
        "",
    ]
    return "\n".join(lines)


def _table(newest: Result, before: Result | None) -> list[str]:
    columns = ["what", "value", "unit", "target", "met"]
    if before is not None:
        columns.append(before.date)
    figures, peers = _headlines(newest.measured)
    rows = [_row(figure, "", before) for figure in figures]
    rows += [_row(figure, "peer: ", before) for figure in peers]
    rule = ["---", "---:", "---", "---", "---", "---:"][: len(columns)]
    lines = [_markdown(cells) for cells in (columns, rule, *rows)]
    rest = len(newest.measured.figures) + len(newest.measured.peers) - len(rows)
    if rest:
        file = f"benchmarks/results/{newest.date}-{newest.name}.json"
        lines += ["", f"{rest} more figures are in `{file}`."]
    return lines


def _headlines(measured: Measured) -> tuple[list[Figure], list[Figure]]:
    """Return what is shown: of a long result only the figures that something was promised for."""
    figures, peers = list(measured.figures), list(measured.peers)
    if len(figures) + len(peers) <= LONGEST:
        return figures, peers
    return [figure for figure in figures if figure.target], []


def _row(figure: Figure, prefix: str, before: Result | None) -> list[str]:
    verdict = {True: "yes", False: "**no**", None: ""}[met(figure)]
    cells = [prefix + figure.name, pretty(figure.value), figure.unit, figure.target, verdict]
    if before is not None:
        known = before.measured.peers if prefix else before.measured.figures
        older = [old.value for old in known if (old.name, old.unit) == (figure.name, figure.unit)]
        cells.append(pretty(older[0]) if older else "")
    return cells


def _markdown(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _machine(machine: Machine) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in sorted(machine.packages.items()))
    parts = [
        machine.cpu,
        f"{machine.cores} cores",
        f"{machine.memory_bytes / 2**30:.0f} GiB",
        *machine.gpus,
        machine.system,
        machine.python,
        packages,
    ]
    return ", ".join(part for part in parts if part)


def main(arguments: list[str]) -> int:
    """Write the page, or only say whether it is up to date."""
    fresh = page(read_all(RESULTS))
    if "--check" in arguments:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current == fresh:
            return 0
        print("docs/numbers.md is out of date; run: python -m scripts.numbers_page")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
