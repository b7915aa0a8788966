"""The page of a loop's run is made of its folder, and of as much as there is."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.train.rl_page import render_report

NOTES = [
    {"step": 0, "text": "step 0 held-out reward: 0.4% sampled, 80.2% greedy"},
    {"step": 3, "text": "step 3 held-out reward: 95.2% sampled, 99.8% greedy"},
    {"step": 3, "text": "a verifier <hung>"},
]
TRANSCRIPTS = [
    {"step": step, "prompt": "^31>", "answer": "13$", "reward": 1.0,
     "sampled_completion": drawn, "sampled_reward": reward}
    for step, drawn, reward in ((0, "7", 0.0), (3, "13$", 1.0))
]  # fmt: skip


def row(step: int, **given: float) -> dict[str, Any]:
    return {
        "step": step, "reward_mean": 0.1 * step, "logprob_gap_max": 1e-6, "length_mean": 4.5,
        "step_s": 0.5, "train_s": 0.2, "answers": 512.0, "staleness_max": 0.0, **given,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("steps = 3\n", encoding="utf-8")
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


def test_what_was_learnt_stands_first(folder: Path) -> None:
    write(folder / "metrics.jsonl", [row(step) for step in (1, 2, 3)])
    write(folder / "notes.jsonl", NOTES)
    write(folder / "transcripts.jsonl", TRANSCRIPTS)
    page = render_report(folder)
    assert "0.4 % → 95.2 %" in page
    assert "80.2 % → 99.8 %" in page
    assert page.index("0.4 % → 95.2 %") < page.index("<svg")
    assert "7  (0)" in page
    assert "13$  ✓" in page
    assert "a verifier &lt;hung&gt;" in page
    assert "staleness" not in page


def test_rewards_of_any_size_are_told_as_they_are(folder: Path) -> None:
    (folder / "config.toml").write_text(
        'steps = 2\n[task]\nname = "questions"\ntrain = "a.jsonl"\n'
        '[[task.rewards]]\nkind = "number"\n'
        '[[task.rewards]]\nkind = "model"\nmodel = "b"\nname = "liked"\n'
    )
    parts = {"reward_mean": -1.5, "reward_number_mean": 0.5, "reward_liked_mean": -2.0}
    write(folder / "metrics.jsonl", [row(step, **parts) for step in (1, 2)])
    said = "step {} held-out reward: {} sampled, {} greedy"
    write(folder / "notes.jsonl", [
        {"step": 0, "text": said.format(0, "-2.25", "-1e-05")},
        {"step": 2, "text": said.format(2, "1", "3.5")},
    ])  # fmt: skip
    write(folder / "transcripts.jsonl", TRANSCRIPTS)
    page = render_report(folder)
    assert "-2.25 → 1" in page
    assert "-1e-05 → 3.5" in page
    assert "each reward, trained on" in page
    assert ">liked" in page
    assert "✓" not in page, "1 is not the most"


def test_a_stale_run_shows_how_stale(folder: Path) -> None:
    stale = [row(step, staleness_max=2.0, staleness_mean=1.5) for step in (1, 2)]
    write(folder / "metrics.jsonl", stale)
    page = render_report(folder)
    assert "1.5 steps stale on average" in page
    assert "staleness (steps)" in page


def test_a_run_that_has_only_begun_has_a_page(folder: Path) -> None:
    assert "0 steps of reinforcement learning" in render_report(folder)
