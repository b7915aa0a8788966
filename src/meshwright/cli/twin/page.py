"""The page of `mw twin --html`: steps as predicted and as measured, drawn on one scale of time."""

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from meshwright.cli.render.html import render_page, render_view
from meshwright.cli.result import CommandResult, NoteView
from meshwright.observe.twin.layout_twin import LayoutTwin
from meshwright.observe.twin.step_comparison import (
    ComparedPass,
    StepComparison,
    StepPhases,
    find_passes,
)
from meshwright.spec.layout.layout_names import describe_layout
from meshwright.spec.units import format_seconds
from meshwright.timeline import Timeline

PHASE_COLORS = {
    "forward": "--compute",
    "backward": "--path",
    "backward-input": "--path",
    "backward-weight": "--cause-3",
}
"""Variables of `render/style.css` by what a pass is called."""
_PARTS: tuple[tuple[str, str, Callable[[StepPhases], float]], ...] = (
    ("in passes", "--compute", lambda phase: phase.passes_s),
    ("bubble", "--idle", lambda phase: phase.bubble_s),
    ("exchange and update", "--communication", lambda phase: phase.outside_passes_s),
)
_WIDTH, _LEFT, _ROW, _GAP, _AXIS = 1120, 150, 26, 16, 26
_LEGIBLE = 15
"""Pixels of a pass that has room for its number."""


class _Side(NamedTuple):
    """One of the two timelines as rows of a picture."""

    title: str
    timeline: Timeline
    step_s: float


def render_twin_page(answer: CommandResult, found: Sequence[LayoutTwin]) -> str:
    """Return the whole file."""
    drawn = "\n".join(
        f"<h2>{number}: {escape(describe_layout(twin.layout))}</h2>\n"
        f"{draw_comparison(twin.predicted, twin.measured, twin.comparison)}"
        for number, twin in enumerate(found, 1)
    )
    notes = [view for view in answer.views if isinstance(view, NoteView)]
    views = [view for view in answer.views if not isinstance(view, NoteView)]
    told = "\n".join(map(render_view, (*views, *notes)))
    return render_page("Steps as predicted and as measured", f"{drawn}\n{told}")


def draw_comparison(predicted: Timeline, measured: Timeline, found: StepComparison) -> str:
    """Return bars of what both steps are spent on, and all their passes, rank by rank."""
    return f"{draw_phase_bars(found)}\n{draw_passes(predicted, measured, found)}"


def draw_phase_bars(found: StepComparison) -> str:
    """Draw what both steps are spent on."""
    longest = max(found.predicted.step_s, found.measured.step_s)
    legend = "".join(_key(name, colour) for name, colour, _ in _PARTS)
    rows = "".join(
        _bar(name, phase, longest)
        for name, phase in (("predicted", found.predicted), ("measured", found.measured))
    )
    return f'<div class="legend">{legend}</div>\n<div class="bars">{rows}</div>'


def _key(name: str, colour: str) -> str:
    return f'<span><i style="background:var({colour})"></i>{escape(name)}</span>'


def _bar(name: str, phase: StepPhases, longest_s: float) -> str:
    parts = "".join(
        f'<i style="background:var({colour});width:{100 * seconds(phase) / longest_s:.2f}%" '
        f'title="{escape(part)}: {format_seconds(seconds(phase))}"></i>'
        for part, colour, seconds in _PARTS
        if seconds(phase) > 0
    )
    step = format_seconds(phase.step_s)
    return f'<div class="bar"><span>{name}</span><div>{parts}</div><span>{step}</span></div>'


def draw_passes(predicted: Timeline, measured: Timeline, found: StepComparison) -> str:
    """Draw every pass of every rank, both steps on one scale."""
    sides = (
        _Side("predicted", predicted, found.predicted.step_s),
        _Side("measured", measured, found.measured.step_s),
    )
    scale = (_WIDTH - _LEFT - 8) / max(side.step_s for side in sides)
    shown, drawn, y = dict[str, None](), list[str](), 0.0
    for side in sides:
        lanes = find_passes(side.timeline)
        drawn.append(f'<text x="0" y="{y + 12}" class="strong">{side.title}</text>')
        y += _GAP
        begin_s = side.timeline.extent_ns[0] / 1e9
        for (rank, stage), lane in sorted(lanes.items()):
            drawn.append(f'<text x="0" y="{y + 16}">rank {rank}, stage {stage}</text>')
            for each in lane:
                shown.setdefault(each.name)
                drawn.append(_pass(each, each.start_s - begin_s, y, scale))
            y += _ROW
        end = _LEFT + side.step_s * scale
        top = y - _ROW * len(lanes)
        drawn.append(f'<path d="M{end:.1f} {top}V{y}" class="end"/>')
        y += _GAP
    drawn += _axis(y, max(side.step_s for side in sides), scale)
    keys = "".join(_key(name, PHASE_COLORS[name]) for name in shown)
    note = "A number is that of the microbatch; the line marks the end of the step."
    return (
        f'<div class="legend">{keys}<span class="note">{note}</span></div>\n'
        f'<svg class="passes" viewBox="0 0 {_WIDTH} {y + _AXIS:.0f}" role="img" '
        f'aria-label="passes of every rank, predicted and measured">{"".join(drawn)}</svg>'
    )


def _pass(each: ComparedPass, start_s: float, y: float, scale: float) -> str:
    x, width = _LEFT + start_s * scale, max(0.6, (each.end_s - each.start_s) * scale)
    about = f"{each}: {format_seconds(each.end_s - each.start_s)}"
    label = (
        f'<text x="{x + width / 2:.1f}" y="{y + 15}" class="inside">{each.microbatch}</text>'
        if width > _LEGIBLE
        else ""
    )
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, width - 0.6):.1f}" height="{_ROW - 5}" rx="2" '
        f'style="fill:var({PHASE_COLORS[each.name]})"><title>{escape(about)}</title></rect>{label}'
    )


def _axis(y: float, longest_s: float, scale: float) -> list[str]:
    """Draw four or five times below all rows, at round numbers."""
    rough = longest_s / 4
    unit = 10.0 ** (len(f"{int(1e6 * rough)}") - 7)
    each = max(unit * times for times in (1, 2, 5) if unit * times <= rough or times == 1)
    drawn = [f'<path d="M{_LEFT} {y}H{_WIDTH - 8}" class="axis"/>']
    moment = 0.0
    while moment <= longest_s:
        x = _LEFT + moment * scale
        drawn.append(f'<path d="M{x:.1f} {y}v4" class="axis"/>')
        drawn.append(f'<text x="{x:.1f}" y="{y + 17}" class="tick">{1e3 * moment:,.0f} ms</text>')
        moment += each
    return drawn
