"""Axes composed: every pair of choices, in layouts of up to eight ranks, trains as one device."""

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

from tests.run.parallel.covering import Choice, choices, covering
from tests.run.parallel.equivalence import check

LAYOUTS = covering()
FEW = 4
"""Layouts of eight ranks that are tried every time; all of them where slow tests are asked for."""


def together(ranks: int, size: int = 8) -> list[tuple[Choice, ...]]:
    rows = [each for each in LAYOUTS if each.ranks == ranks]
    return [tuple(rows[first : first + size]) for first in range(0, len(rows), size)]


def wrong(rows: tuple[Choice, ...]) -> dict[str, list[str]]:
    return {name: lines for name, lines in check([row.case() for row in rows]).items() if lines}


def test_the_layouts_show_every_pair_of_choices() -> None:
    pairs = {
        (one, row[one], other, row[other])
        for row in choices()
        for one in range(len(row))
        for other in range(one)
    }
    shown = {
        (one, row[one], other, row[other])
        for row in LAYOUTS
        for one in range(len(row))
        for other in range(one)
    }
    assert shown == pairs
    assert len(LAYOUTS) >= 24


def test_some_layouts_of_eight_ranks() -> None:
    assert wrong(together(8, FEW)[0]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [row for ranks in (2, 4, 8) for row in together(ranks)], ids=lambda rows: rows[0].name
)
def test_every_layout(rows: tuple[Choice, ...]) -> None:
    assert wrong(rows) == {}
