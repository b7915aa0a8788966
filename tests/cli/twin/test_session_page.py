"""The report of the demo holds every command with its answer, and needs nothing from outside."""

import re
from pathlib import Path

from meshwright.cli.render.step_bars import STEP_SEGMENTS
from meshwright.cli.result import CommandResult, NoteView, make_fields
from meshwright.cli.twin.session_page import SessionEntry, render_session
from meshwright.timeline import write_timeline
from tests.cli.twin.test_page import MEASURED, PREDICTED

PLAN = {**{part.field: 1.0 for part in STEP_SEGMENTS}, "step_s": 10.0, "mfu": 0.5}
LAYOUT = {"predicted": {"step_s": 7.0}, "measured": {"step_s": 14.0}, "step_error": -0.5}
TOLD = (
    SessionEntry(
        "Plan", "What fits.", "mw plan a <b>", CommandResult("plan/2", {"plans": [PLAN]}, ()), 2.0
    ),
    SessionEntry(
        "Run",
        "What happened.",
        "mw twin",
        CommandResult(
            "twin/2",
            {"layouts": [LAYOUT]},
            (NoteView("turns"), make_fields({"model": "tiny & small"})),
        ),
        3.0,
    ),
)


def test_each_chapter_has_its_commands_and_answers(tmp_path: Path) -> None:
    write_timeline(PREDICTED, tmp_path / "predicted")
    write_timeline(MEASURED, tmp_path / "measured")
    page = render_session(TOLD, tmp_path)
    assert re.findall(r'class="chapter">([^<]*)<', page) == ["1. Plan", "2. Run"]
    assert "mw plan a &lt;b&gt;" in page
    assert "tiny &amp; small" in page
    assert "steps of 7 s and 14 s: -50.0%" in page
    assert "a step of 10 s, 50.0% MFU" in page
    assert page.count("<rect") == 8  # four passes of each side
    assert not re.search(r'(src|href)="(?!#)', page)


def test_without_a_run_nothing_is_drawn_of_one() -> None:
    page = render_session(TOLD[:1], None)
    assert "<rect" not in page
    assert "Run" not in page
