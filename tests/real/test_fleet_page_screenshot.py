"""The page of a fleet's week, drawn by a real browser, in light and in dark."""

from pathlib import Path

import pytest

from meshwright.cli.fleet.report_page import render_report_page
from meshwright.fleet.account import build_account
from meshwright.fleet.account.prices import parse_prices
from meshwright.fleet.account.report import build_report
from tests.fleet.account.rows import DAY, HOUR, jobs, nodes
from tests.real.drawn import drawn

pytestmark = pytest.mark.real

PRODUCTIVE, LOST, FREE = (42, 157, 74), (228, 87, 86), (213, 219, 225)
"""Colours of the light page (`cli/render/style.css`)."""


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node that works half of each day, and one of which a quarter is lost."""
    work = [
        {"job": str(day), "start_s": day * DAY, "end_s": day * DAY + 12 * HOUR, "gpus": 8.0,
         "nodes": ["n1"], "user": "ann", "gpu_util": 0.9}
        for day in range(7)
    ]  # fmt: skip
    work.append(
        {"job": "b", "start_s": 0.0, "end_s": 7 * DAY, "gpus": 4.0, "nodes": ["n2"],
         "state": "failed", "user": "bob"}
    )  # fmt: skip
    found = build_account(
        jobs(*work), nodes({"node": "n1"}, {"node": "n2"}), since_s=0, until_s=7 * DAY
    )
    out = tmp_path_factory.mktemp("week") / "week.html"
    out.write_text(
        render_report_page(build_report(found, parse_prices("2"), "user", 10)), encoding="utf-8"
    )
    return out


def test_hours_are_drawn_in_proportion(week: Path, tmp_path: Path) -> None:
    colours = drawn(week, tmp_path / "light.png", 2000)
    # A quarter of all hours each works and is lost, half had no demand: a bar of 34 by 1,155 pixels
    # and seven days of 210 by 76 pixels or more.
    bar, days = 34 * 1155, 7 * 210 * 76
    for colour, share in ((PRODUCTIVE, 0.25), (LOST, 0.25), (FREE, 0.5)):
        assert colours[colour] > 0.8 * share * (bar + days)


def test_a_dark_screen_gets_a_dark_page(week: Path, tmp_path: Path) -> None:
    colours = drawn(week, tmp_path / "dark.png", 2000, "--force-dark-mode")
    assert colours[15, 20, 26] > 1280 * 2000 / 2
