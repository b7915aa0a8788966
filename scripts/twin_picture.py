r"""Draws predicted and measured steps of a GPU side by side, and prints them as a table.

    python -m scripts.twin_picture [RESULT.json] [--svg docs/figures/twin-gpu.svg]

Without a file, the newest result of `benchmarks/twin_gpu.py`. The picture has two bars for each
configuration, predicted above measured, both parted by kind of work and over the measured step;
the table is the one of docs/guide/twin.md.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from meshwright.cli.render.files import write_text
from meshwright.observe.twin.step_breakdown import SHOWN_KINDS

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
COLOURS = (
    "#4c78a8", "#9ecae9", "#f58518", "#54a24b", "#88d27a", "#b79a20", "#e45756", "#ff9d98",
    "#79706e", "#bab0ac", "#b279a2", "#d6a5c9", "#d4a6c8", "#9c755f", "#e0e0e0",
)  # fmt: skip
"""One for each kind of work, in their order."""
_LEFT, _PLOT, _RIGHT, _BAR, _ROW, _TOP = 16, 620, 90, 13, 50, 92
_FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="#222"'


class Side(NamedTuple):
    """A step."""

    step_ms: float
    memory_gib: float
    parts_ms: Mapping[str, float]


class Row(NamedTuple):
    """A configuration."""

    title: str
    predicted: Side
    measured: Side

    @property
    def step_off(self) -> float:
        """How much longer the predicted step is, as a share of the measured one."""
        return self.predicted.step_ms / self.measured.step_ms - 1

    @property
    def memory_off(self) -> float:
        """The same of memory."""
        return self.predicted.memory_gib / self.measured.memory_gib - 1


def rows_of(figures: Sequence[Mapping[str, object]]) -> list[Row]:
    """Gather the figures of each configuration."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for one in figures:
        title, colon, rest = str(one["name"]).partition(": ")
        what, _, side = rest.rpartition(" ")
        if colon and side in ("predicted", "measured"):
            sides = found.setdefault(title, {"predicted": {}, "measured": {}})
            sides[side][what] = float(str(one["value"]))
    return [
        Row(title, _side(one["predicted"]), _side(one["measured"])) for title, one in found.items()
    ]


def _side(values: Mapping[str, float]) -> Side:
    parts = {str(part): values[part] for part in SHOWN_KINDS if part in values}
    return Side(values["step"], values["memory"], parts)


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| configuration | step predicted | measured | off | memory predicted | measured | off |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.title} | {row.predicted.step_ms:.1f} ms | {row.measured.step_ms:.1f} ms "
        f"| {100 * row.step_off:+.1f} % | {row.predicted.memory_gib:.1f} GiB "
        f"| {row.measured.memory_gib:.1f} GiB | {100 * row.memory_off:+.1f} % |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def picture(rows: Sequence[Row]) -> str:
    """Draw the rows."""
    width, height = _LEFT + _PLOT + _RIGHT, _TOP + _ROW * len(rows) + 8
    scale = _PLOT / max(
        [1.0, *(sum(row.predicted.parts_ms.values()) / row.measured.step_ms for row in rows)],
        default=1.0,
    )
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="600">Predicted (above) and measured '
        "steps, over the measured one</text>",
        *_legend(rows),
    ]
    for index, row in enumerate(rows):
        top = _TOP + _ROW * index
        drawn.append(f'<text x="{_LEFT}" y="{top + 10}">{escape(row.title)}</text>')
        for number, side in enumerate((row.predicted, row.measured)):
            drawn += _bar(side, row.measured.step_ms, scale, top + 15 + number * (_BAR + 1))
        drawn.append(
            f'<text x="{width - 8}" y="{top + 32}" text-anchor="end">'
            f"{100 * row.step_off:+.1f} %</text>"
        )
    return "\n".join([*drawn, "</svg>", ""])


def _bar(side: Side, step_ms: float, scale: float, top: float) -> list[str]:
    drawn, x = [], float(_LEFT)
    for part, ms in side.parts_ms.items():
        wide = ms / step_ms * scale
        drawn.append(
            f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{_BAR}" '
            f'fill="{_colour(part)}"><title>{escape(part)}: {ms:.1f} ms</title></rect>'
        )
        x += wide
    return drawn


def _legend(rows: Sequence[Row]) -> list[str]:
    used = [part for part in SHOWN_KINDS if any(part in row.predicted.parts_ms for row in rows)]
    drawn, x, y = [], float(_LEFT), 40
    for part in used:
        wide = 24 + 6.8 * len(part)
        if x + wide > _LEFT + _PLOT + _RIGHT:
            x, y = float(_LEFT), y + 18
        drawn.append(
            f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{_colour(part)}"/>'
        )
        drawn.append(f'<text x="{x + 14:.0f}" y="{y}">{part}</text>')
        x += wide
    return drawn


def _colour(part: str) -> str:
    return COLOURS[[str(one) for one in SHOWN_KINDS].index(part)]


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", nargs="?", type=Path)
    parser.add_argument("--svg", default="")
    given = parser.parse_args()
    path = given.result or max(RESULTS.glob("*-twin_gpu.json"))
    rows = rows_of(json.loads(path.read_text(encoding="utf-8"))["measured"]["figures"])
    if given.svg:
        write_text(given.svg, picture(rows))
    print(table(rows), end="")


if __name__ == "__main__":
    main()
