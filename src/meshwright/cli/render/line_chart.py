"""Curves over steps as a self-contained SVG: a loss with its held-out points, a rate, a share."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple
from xml.sax.saxutils import escape

_PLOT, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 546, 250, 64, 150, 34, 34
_LETTER = 7.2
"""Width of a letter at most, but for a few wide ones among narrow ones."""
_FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="#222"'
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#79706e")
_MOST_POINTS = 600
"""More than a screen shows; longer curves are drawn by their mean over equal stretches."""


class ChartLine(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """Step and value, by step."""
    show_points: bool = False
    """Mark each point: for curves of a few points."""


class LineChart(NamedTuple):
    """Curves that share their axes."""

    title: str
    lines: Sequence[ChartLine]
    y_unit: str = ""
    x_label: str = "step"
    y_min: float | None = None
    """Where the values' axis begins at the latest; None begins near the lowest of them."""


def draw_line_charts(charts: Sequence[LineChart]) -> str:
    """Draw charts below each other in one picture."""
    shown = [chart for chart in charts if any(curve.points for curve in chart.lines)]
    height = _HEIGHT * max(1, len(shown))
    labels = [_label(curve) for chart in shown for curve in chart.lines if curve.points]
    # Names are the users' own, of files and runs, and may be long.
    right = max(_RIGHT, 20 + math.ceil(_LETTER * max(map(len, labels), default=0)))
    width = _LEFT + _PLOT + right
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, chart in enumerate(shown):
        drawn += _chart(chart, _HEIGHT * index)
    return "\n".join([*drawn, "</svg>", ""])


def _chart(chart: LineChart, top: float) -> list[str]:
    curves = [curve._replace(points=_finite(curve.points)) for curve in chart.lines]
    everything = [point for curve in curves for point in curve.points]
    if not everything:
        return []
    first, last = (edge(x for x, _ in everything) for edge in (min, max))
    floor = [] if chart.y_min is None else [chart.y_min]
    low, high, ticks = _scale([*floor, *(y for _, y in everything)])
    plot_w, plot_h = _PLOT, _HEIGHT - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + plot_w * ((x - first) / (last - first) if last > first else 0.5)

    def down(y: float) -> float:
        return top + _TOP + plot_h * (1 - (y - low) / (high - low))

    unit = f" ({chart.y_unit})" if chart.y_unit else ""
    drawn = [
        f'<text x="{_LEFT}" y="{top + 20}" font-size="14" font-weight="600">'
        f"{escape(chart.title + unit)}</text>"
    ]
    for tick in ticks:
        y = down(tick)
        drawn.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + plot_w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>'
        )
        drawn.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
        )
    bottom = top + _HEIGHT - _BOTTOM + 18
    drawn += [
        f'<text x="{across(x):.1f}" y="{bottom}" text-anchor="middle">{_short(x)}</text>'
        for x in _places(first, last)
    ]
    drawn.append(f'<text x="{_LEFT + plot_w + 24}" y="{bottom}">{escape(chart.x_label)}</text>')
    ends = []
    for curve, colour in zip(curves, COLORS * (1 + len(curves) // len(COLORS)), strict=False):
        if not curve.points:
            continue
        places = [(across(x), down(y)) for x, y in _thinned(curve.points)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        if curve.show_points:
            drawn += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places
            ]
        ends.append((places[-1][1], _label(curve), colour))
    for y, text, colour in _apart(ends, top + _HEIGHT - _BOTTOM - 4):
        drawn.append(
            f'<text x="{_LEFT + plot_w + 10}" y="{y + 4:.1f}" fill="{colour}">{escape(text)}</text>'
        )
    return drawn


def _label(curve: ChartLine) -> str:
    return f"{curve.name} {_short(curve.points[-1][1])}"


def _apart(ends: list[tuple[float, str, str]], lowest: float) -> list[tuple[float, str, str]]:
    """Move labels down until none lies on another, and back up where they would leave the chart."""
    placed: list[tuple[float, str, str]] = []
    for y, text, colour in sorted(ends):
        place = y if not placed else max(y, placed[-1][0] + 15)
        placed.append((place, text, colour))
    for index in range(len(placed) - 1, -1, -1):
        y, text, colour = placed[index]
        place = min(y, lowest)
        placed[index] = (place, text, colour)
        lowest = place - 15
    return placed


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MOST_POINTS:
        return list(points)
    cuts = [len(points) * index // _MOST_POINTS for index in range(_MOST_POINTS + 1)]
    parts = [points[a:b] for a, b in pairwise(cuts)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


def _scale(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return round ends around the values, and round places between them."""
    low, high = min(values), max(values)
    if high == low == 0:
        high = 1.0  # a count of nothing has no negative side
    elif high == low:
        low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    each = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / each), math.ceil(high / each)
    ticks = [each * count for count in range(first, last + 1)]
    return ticks[0], ticks[-1], ticks


def _places(first: float, last: float) -> list[float]:
    """Return round places between two ends, or the one there is."""
    if first == last:
        return [first]
    places = [place for place in _scale([first, last])[2] if first <= place <= last]
    # There is no step 2.5.
    whole = [place for place in places if place == round(place)]
    return whole if first == round(first) and last == round(last) else places


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"
