"""The report of a real job, drawn by a real browser, in light and in dark."""

from pathlib import Path

import pytest

from meshwright.cli import main
from tests.real.drawn import drawn

pytestmark = pytest.mark.real

COMPUTE, COMMUNICATION = (76, 120, 168), (245, 133, 24)
"""Colours of the light page (`cli/render/style.css`)."""


@pytest.fixture(scope="module")
def page(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the 8-rank job."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    folder = shared / "traces" / "modded-nanogpt" / "8rank-h100-2025-12-11"
    assert main(["analyze", str(folder), "--html", str(out), "--no-cache", "-q"]) == 0
    return out


def test_bars_and_timeline_are_drawn_in_their_colours(page: Path, tmp_path: Path) -> None:
    colours = drawn(page, tmp_path / "light.png", 2600)
    # The bars alone: 8 of about 16 by 930 pixels, 70 % compute and 20 % communication.
    assert colours[COMPUTE] > 8 * 16 * 930 * 0.5
    assert colours[COMMUNICATION] > 8 * 16 * 930 * 0.12
    assert colours[255, 255, 255] > 1280 * 2600 / 2


def test_a_dark_screen_gets_a_dark_page(page: Path, tmp_path: Path) -> None:
    colours = drawn(page, tmp_path / "dark.png", 2600, "--force-dark-mode")
    assert colours[15, 20, 26] > 1280 * 2600 / 2
    assert COMPUTE not in colours or colours[COMPUTE] < 1000
