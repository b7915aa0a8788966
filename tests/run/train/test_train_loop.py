"""The loop in one file runs, and what it trains can add."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "train_loop.py"


@pytest.mark.slow
def test_it_learns_to_add(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-3:] == ["2+2=4", "7+5=12", "9+9=18"]


def test_it_fits_on_two_screens() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 100
