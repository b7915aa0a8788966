"""The report of the demo holds every command with its answer, and needs nothing from outside."""

import re
from pathlib import Path

from meshwright.cli.answer import Answer, Note, facts
from meshwright.cli.bars import STEP_PARTS
from meshwright.cli.loop_page import Told, report
from meshwright.timeline import write
from tests.cli.test_twin_page import MEASURED, PREDICTED

PLAN = {**{part.field: 1.0 for part in STEP_PARTS}, "step_s": 10.0, "mfu": 0.5}
LAYOUT = {"predicted": {"step_s": 7.0}, "measured": {"step_s": 14.0}, "step_error": -0.5}
TOLD = (
    Told("Plan", "What fits.", "mw plan a <b>", Answer("plan/1", {"plans": [PLAN]}, ()), 2.0),
    Told(
        "Run",
        "What happened.",
        "mw twin",
        Answer("twin/1", {"layouts": [LAYOUT]}, (Note("turns"), facts({"model": "tiny & small"}))),
        3.0,
    ),
)


def test_each_chapter_has_its_commands_and_answers(tmp_path: Path) -> None:
    write(PREDICTED, tmp_path / "predicted")
    write(MEASURED, tmp_path / "measured")
    page = report(TOLD, tmp_path)
    assert re.findall(r'class="chapter">([^<]*)<', page) == ["1. Plan", "2. Run"]
    assert "mw plan a &lt;b&gt;" in page
    assert "tiny &amp; small" in page
    assert "steps of 7 s and 14 s: -50.0%" in page
    assert "a step of 10 s, 50.0% MFU" in page
    assert page.count("<rect") == 8  # four passes of each side
    assert not re.search(r'(src|href)="(?!#)', page)


def test_without_a_run_nothing_is_drawn_of_one() -> None:
    page = report(TOLD[:1], None)
    assert "<rect" not in page
    assert "Run" not in page
