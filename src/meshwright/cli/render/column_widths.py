"""Fits a table into a narrow terminal without cutting a number: prose, heads, bars, names give way.

Prose wraps, heads break between words, bars are drawn shorter, names go on in a second line; a
number that lost its last digits would be another number.
"""

import re
from collections.abc import Iterable, Sequence

from meshwright.cli.result import TableView

GAP = 2
"""Columns of the terminal between two columns of a table."""
_BAR = re.compile(r"[█▓▒░◆▸═·○▼ ]*")
_EASY_PROSE, _TIGHT_PROSE = 40, 24
_SHORT_BAR, _LEAST_BAR = 12, 6
_SHORT_NAME, _LEAST_NAME = 24, 12


def fit_columns(view: TableView, room: int) -> tuple[int, ...]:
    """How wide each column is drawn in so much room; as wide as it is where all of it fits."""
    heads = [len(column) for column in view.columns]
    cells = [_longest(row[at] for row in view.rows) for at in range(len(heads))]
    words = [max(map(len, column.split()), default=0) for column in view.columns]
    widths = [max(pair) for pair in zip(heads, cells, strict=True)]
    every = range(len(widths))
    prose = [at for at in every if view.columns[at] in view.wrapped]
    bars = [at for at in every if view.columns[at] in view.bar_columns]
    rest = [at for at in every if at not in prose and at not in bars]
    names = [at for at in rest if view.columns[at] not in view.right_aligned]
    told = [_longest(_parts(row[at])[1] for row in view.rows) for at in every]
    yields: tuple[tuple[Sequence[int], Sequence[int]], ...] = (
        (prose, [_EASY_PROSE] * len(widths)),
        (rest, [max(pair) for pair in zip(cells, words, strict=True)]),
        (prose, [_TIGHT_PROSE] * len(widths)),
        (bars, [max(_SHORT_BAR, size) for size in told]),
        (names, [max(_SHORT_NAME, size) for size in words]),
        (bars, [max(_LEAST_BAR, size) for size in told]),
        ([*prose, *names], [max(_LEAST_NAME, size) for size in words]),
    )
    for those, least in yields:
        excess = sum(widths) + GAP * (len(widths) - 1) - room
        _narrow(widths, those, least, excess)
    return tuple(widths)


def _narrow(widths: list[int], those: Sequence[int], least: Sequence[int], excess: int) -> None:
    """Take what is too much from the widest of some columns, down to the least of each."""
    while excess > 0:
        left = [at for at in those if widths[at] > least[at]]
        if not left:
            return
        widest = max(left, key=lambda at: widths[at])
        widths[widest] -= 1
        excess -= 1


def scale_bars(bars: Sequence[str], width: int) -> list[str]:
    """Bars of one column drawn to the same smaller scale, what is written after them kept."""
    parts = [_parts(bar) for bar in bars]
    scales = [(width - len(text)) / len(marks) for marks, text in parts if marks]
    scale = min([1.0, *scales])
    return [_sampled(marks, max(0.0, scale)) + text for marks, text in parts]


def _sampled(marks: str, scale: float) -> str:
    """Every so many-th mark, from the middle of what it stands for."""
    count = int(len(marks) * scale + 1e-9)
    return "".join(marks[int((at + 0.5) / scale)] for at in range(count))


def _parts(cell: str) -> tuple[str, str]:
    """The marks that a cell begins with, and what is written after them."""
    found = _BAR.match(cell)
    end = found.end() if found else 0
    return cell[:end], cell[end:]


def _longest(texts: Iterable[str]) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)
