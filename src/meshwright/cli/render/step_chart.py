"""A picture of steps side by side: one stacked bar for each, as a self-contained SVG file."""

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from meshwright.cli.render.files import write_text
from meshwright.cli.render.step_bars import STEP_SEGMENTS
from meshwright.predict.step.step_prediction import StepPrediction

COLORS = (
    "#4c78a8", "#9ecae9", "#f58518", "#ffbf79", "#54a24b", "#88d27a", "#b79a20", "#b279a2",
    "#e45756", "#79706e",
)  # fmt: skip
"""One for each part of a step, in their order."""
_PLOT, _ROW, _TOP, _REST = 520, 30, 76, 180
_LETTER = 7.0
"""Pixels of a letter, wide enough for any system font of that size."""
_FONT = 'font-family="system-ui, sans-serif" font-size="13" fill="#222"'


class StepChartRow(NamedTuple):
    """One line of the chart."""

    label: str
    step: StepPrediction | None
    """Its bar; None leaves only the text."""
    text: str
    """What stands behind the bar."""


def draw_step_chart(title: str, rows: Sequence[StepChartRow]) -> str:
    """Draw the rows to one scale; the first is the baseline, marked by a line down the chart."""
    longest = max((row.step.step_s for row in rows if row.step is not None), default=1.0)
    left = 26 + _LETTER * max((len(row.label) for row in rows), default=0)
    width, height = left + _PLOT + _REST, _TOP + _ROW * len(rows) + 16
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" {_FONT}>',
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        f'<text x="16" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
        *_legend(rows),
    ]
    base = rows[0].step if rows else None
    if base is not None:
        x = left + base.step_s * _PLOT / longest
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height - 12}" '
            'stroke="#222" stroke-dasharray="3 3"/>'
        )
    for index, row in enumerate(rows):
        drawn += _row(row, left, _TOP + _ROW * index, _PLOT / longest)
    return "\n".join([*drawn, "</svg>", ""])


def write_step_chart(path: str, title: str, rows: Sequence[StepChartRow]) -> None:
    """Write the chart to a file."""
    write_text(path, draw_step_chart(title, rows))


def _legend(rows: Sequence[StepChartRow]) -> list[str]:
    drawn, x = [], 16.0
    for part, colour in zip(STEP_SEGMENTS, COLORS, strict=True):
        if any(row.step is not None and getattr(row.step, part.field) > 0 for row in rows):
            name = part.name.removeprefix("exposed ")
            drawn.append(f'<rect x="{x}" y="40" width="12" height="12" fill="{colour}"/>')
            drawn.append(f'<text x="{x + 17}" y="51" font-size="12">{name}</text>')
            x += 34 + 6.3 * len(name)
    return drawn


def _row(row: StepChartRow, left: float, y: float, scale: float) -> list[str]:
    middle, x = y + _ROW / 2 + 1, left
    drawn = [f'<text x="{left - 10:.0f}" y="{middle}" text-anchor="end">{escape(row.label)}</text>']
    for part, colour in zip(STEP_SEGMENTS, COLORS, strict=True):
        size = getattr(row.step, part.field) * scale if row.step is not None else 0.0
        if size > 0:
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, size - 0.7):.1f}" '
                f'height="{_ROW - 9}" fill="{colour}"><title>{part.name}</title></rect>'
            )
        x += size
    # A white edge keeps the text readable where the baseline crosses it.
    edge = 'stroke="white" stroke-width="5" paint-order="stroke"'
    drawn.append(f'<text x="{x + 8:.1f}" y="{middle}" {edge}>{escape(row.text)}</text>')
    return drawn
