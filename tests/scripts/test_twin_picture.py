"""The picture and the table of a GPU's predicted and measured steps."""

import json
from pathlib import Path

from scripts.twin_picture import RESULTS, picture, rows_of, table

ROOT = Path(__file__).resolve().parents[2]
NEWEST = max(RESULTS.glob("*-twin_gpu.json"))


def figures() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(NEWEST.read_text())["measured"]["figures"]
    return found


def test_every_configuration_has_both_sides() -> None:
    rows = rows_of(figures())
    assert len(rows) >= 12
    for row in rows:
        assert row.predicted.parts_ms.keys() == row.measured.parts_ms.keys()
        assert row.measured.step_ms > 0
        assert abs(row.step_off) < 0.5


def test_the_guide_has_the_newest_result() -> None:
    rows = rows_of(figures())
    assert (ROOT / "docs" / "figures" / "twin-gpu.svg").read_text() == picture(rows)
    assert table(rows) in (ROOT / "docs" / "guide" / "twin.md").read_text()
