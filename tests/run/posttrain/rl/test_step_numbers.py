"""Whatever people read of a run counts its steps alike, from 1, also where it was gone on from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.cli import main
from meshwright.run.posttrain.rl import RLConfig, run_rl
from meshwright.run.posttrain.rl.config.rl_config import TaskConfig, WarmupConfig
from meshwright.run.posttrain.rl.run_state import RLRunState
from tests.run.posttrain.rl.small import EVALUATED, settings

FAILING = TaskConfig(
    name="tests.run.posttrain.rl.environments:judged",
    options={"verifier": "raises", "first": 9, "bad": 2},
)
WORDS = ["steps=4", "prompts_per_step=2", "group_size=2", "checkpoint_every_steps=2",
         "evaluate.num_prompts=4",
         "warm_up.steps=1", "device=cpu"]  # fmt: skip


def lines(folder: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


class Interrupted(Exception):
    """Ends a run as a fault of our own would."""


@pytest.fixture
def stops_after_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stops once, behind the row of its third step."""
    written, stopped = RLRunState.write_metrics, list[int]()

    def row(self: RLRunState, trained: int, figures: Mapping[str, float]) -> None:
        written(self, trained, figures)
        if trained == 3 and not stopped:
            stopped.append(trained)
            raise Interrupted

    monkeypatch.setattr(RLRunState, "write_metrics", row)


def gone_on(given: RLConfig) -> None:
    with pytest.raises(Interrupted):
        run_rl(given)
    run_rl(given)


@pytest.mark.usefixtures("stops_after_three")
def test_notes_say_after_how_many_steps_they_were_said(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    gone_on(settings(folder=folder, steps=4, checkpoint_every_steps=2, evaluate=EVALUATED))
    assert [row["step"] for row in lines(folder, "metrics.jsonl")] == [1, 2, 3, 4]
    notes = [(note["step"], note["text"]) for note in lines(folder, "notes.jsonl")]
    found = [(step, text) for step, text in notes if text.startswith(("step", "goes on"))]
    assert [step for step, _ in found] == [0, 2, 4]
    assert [text.partition(":")[0] for _, text in found] == [
        "step 0 held-out reward", "goes on after step 2", "step 4 held-out reward"
    ]  # fmt: skip


@pytest.mark.usefixtures("stops_after_three")
def test_a_rollout_is_named_by_the_step_of_its_row_and_once(tmp_path: Path) -> None:
    given = settings(
        folder=str(tmp_path / "run"), steps=4, task=FAILING, warm_up=WarmupConfig(),
        evaluate=EVALUATED,
    )  # fmt: skip
    gone_on(given)
    rows, notes = (lines(given.folder, f"{name}.jsonl") for name in ("metrics", "notes"))
    (failed,) = (row["step"] for row in rows if row["unscored"])
    assert failed == 3
    # All was trained again, and nothing judged again.
    named = [note["text"] for note in notes if note["text"].startswith(f"step {failed}, prompt ")]
    assert len(named) == len(set(named)) == 2 * given.group_size
    assert any(note["text"].startswith("held out, prompt 9: ") for note in notes), "of no step"


@pytest.mark.usefixtures("stops_after_three")
def test_the_answer_says_from_where_a_run_went_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "--recipe",
        "grpo",
        "sorting-digits",
        *WORDS,
        "--output-dir",
        str(tmp_path / "a"),
    ]
    with pytest.raises(Interrupted):
        main([*words, "--debug"])
    assert main(words) == 0
    assert "steps\t4, from 2 on\n" in capsys.readouterr().out
