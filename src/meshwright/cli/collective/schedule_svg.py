"""Pictures of a collective: its moves in space and time, and what each link carries.

Both are self-contained SVG files. Ranks are lines, steps run to the right, a move is an arrow in
the colour of its chunk: solid where it adds, dashed where it copies.
"""

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from meshwright.policy.collective import ChunkMoves, Collective

MAX_ENDPOINTS = 48
MAX_STEPS = 64
_LEFT, _TOP, _STEP, _LINE = 96, 72, 78, 34
_FONT = 'font-family="system-ui, sans-serif" font-size="13" fill="#222"'
_LETTER = 7.0
_PLOT = 420


class LinkLoadBar(NamedTuple):
    """What one link carries."""

    name: str
    share: float
    """Of the busiest link's time, from 0 to 1."""
    text: str


def draw_schedule(collective: Collective) -> tuple[str, str]:
    """Draw the moves; return the picture and what was left out of it."""
    places, steps = min(collective.num_endpoints, MAX_ENDPOINTS), min(collective.steps, MAX_STEPS)
    width, height = _LEFT + steps * _STEP + 40, _TOP + places * _LINE + 30
    title = f"{collective.name} {collective.op.replace('_', '-')}, {collective.ranks} ranks"
    drawn = [
        *_frame(width, height, title),
        '<text x="16" y="46" font-size="12" fill="#555">steps to the right; colour is the chunk, '
        "grey several; solid adds, dashed copies</text>",
        *_lines(collective, places, steps),
    ]
    for step, moves in collective.iterate_steps():
        if step >= steps:
            break
        seen = (moves.src < places) & (moves.dst < places)
        drawn += _arrows(ChunkMoves(moves.table[seen]), step, collective)
    left_out = []
    if collective.num_endpoints > places:
        left_out.append(f"{collective.num_endpoints - places} of {collective.num_endpoints} places")
    if collective.steps > steps:
        left_out.append(f"{collective.steps - steps} of {collective.steps} steps")
    return "\n".join([*drawn, "</svg>", ""]), " and ".join(left_out)


def draw_link_loads(title: str, rows: Sequence[LinkLoadBar]) -> str:
    """Draw what each link carries, the busiest first as given."""
    left = 26 + _LETTER * max((len(row.name) for row in rows), default=0)
    width, height = left + _PLOT + 230, 52 + 24 * len(rows) + 16
    drawn = _frame(width, height, title)
    for index, row in enumerate(rows):
        y = 48 + 24 * index
        shade = "#e45756" if row.share > 0.999 else "#4c78a8"
        drawn += [
            f'<text x="{left - 10:.0f}" y="{y + 13}" text-anchor="end">{escape(row.name)}</text>',
            f'<rect x="{left:.0f}" y="{y}" width="{max(1.0, row.share * _PLOT):.1f}" height="16" '
            f'fill="{shade}"/>',
            f'<text x="{left + row.share * _PLOT + 8:.0f}" y="{y + 13}">{escape(row.text)}</text>',
        ]
    return "\n".join([*drawn, "</svg>", ""])


def _frame(width: float, height: float, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f"{_FONT}>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/>'
        "</marker></defs>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="16" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]


def _lines(collective: Collective, places: int, steps: int) -> list[str]:
    drawn = []
    for place in range(places):
        y, switch = _TOP + place * _LINE, place >= collective.ranks
        look = 'stroke="#999" stroke-dasharray="2 4"' if switch else 'stroke="#bbb"'
        drawn.append(
            f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end" font-size="12">'
            f"{escape(collective.format_endpoint(place))}</text>"
        )
        drawn.append(f'<line x1="{_LEFT}" x2="{_LEFT + steps * _STEP}" y1="{y}" y2="{y}" {look}/>')
    bottom = _TOP + (places - 1) * _LINE
    for step in range(steps + 1):
        x = _LEFT + step * _STEP
        drawn.append(f'<line x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{bottom + 8}" stroke="#eee"/>')
        if step < steps:
            drawn.append(
                f'<text x="{x + _STEP / 2}" y="{bottom + 26}" text-anchor="middle" '
                f'font-size="11" fill="#777">{step}</text>'
            )
    return drawn


def _arrows(moves: ChunkMoves, step: int, collective: Collective) -> list[str]:
    """Draw the moves of one step; chunks that travel together share an arrow."""
    drawn = []
    chunks = collective.chunks
    order = np.lexsort((moves.src_slot, moves.adds, moves.dst, moves.src))
    groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for row in order:
        key = (int(moves.src[row]), int(moves.dst[row]), int(moves.adds[row]))
        groups.setdefault(key, []).append((int(moves.src_slot[row]), int(moves.count[row])))
    for (src, dst, adds), slots in groups.items():
        several = len(slots) > 1 or slots[0][1] > 1
        hue = round(360 * (slots[0][0] % chunks) / chunks)
        colour, width = ("#666", 2.4) if several else (f"hsl({hue},65%,42%)", 1.6)
        x1, y1 = _LEFT + step * _STEP + 6, _TOP + src * _LINE
        x2, y2 = _LEFT + (step + 1) * _STEP - 6, _TOP + dst * _LINE
        dash = "" if adds else ' stroke-dasharray="5 3"'
        verb = "adds" if adds else "copies"
        named = ", ".join(_range(start, count) for start, count in slots[:12])
        more = f" and {len(slots) - 12} more" if len(slots) > 12 else ""
        tip = f"step {step}: {collective.format_endpoint(src)} {verb} {named}{more} to "
        path = f"M{x1},{y1} L{x2},{y2}"
        if src == dst:
            path = f"M{x1},{y1} C{x1 + 10},{y1 - 16} {x2 - 10},{y2 - 16} {x2},{y2}"
        drawn.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"'
            f'{dash} marker-end="url(#head)"><title>'
            f"{escape(tip + collective.format_endpoint(dst))}</title></path>"
        )
    return drawn


def _range(start: int, count: int) -> str:
    return f"chunk {start}" if count == 1 else f"chunks {start}–{start + count - 1}"
