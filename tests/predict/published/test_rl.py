"""Published steps of reinforcement learning beside ours."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.predict.published.rl import read_rows, score, setup_of, spread

RUNS = Path(__file__).parents[3] / "validation/rl/runs.json"


def test_every_row_is_either_predicted_or_says_why_not() -> None:
    rows = read_rows(RUNS)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        if row.not_comparable:
            assert score(row).outcome is None
            continue
        setup = setup_of(row)
        assert setup.gpus == row.gpus
        assert {name: getattr(setup.training, name) for name in row.trainer} == row.trainer
        assert row.step_s
        assert row.tokens_per_s_per_gpu
        # What was printed agrees with itself: tokens over time and GPUs; one row by 19 % only.
        tokens = row.prompts * row.samples * row.mean_tokens
        printed = row.tokens_per_s_per_gpu * row.step_s * row.gpus
        assert printed == pytest.approx(tokens, rel=0.2)


def test_lengths_are_spread_around_the_mean_that_was_printed() -> None:
    assert spread(900, 3936).mean() == pytest.approx(900, rel=1e-3)
    assert spread(3000, 3936).mean() == pytest.approx(3000, rel=1e-3)
    with pytest.raises(InputError, match="is not below the longest"):
        spread(4000, 3936)


def test_the_command_shows_both_and_lists_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(RUNS.read_text())
    few = tmp_path / "runs.json"
    kept = [row for row in rows if "235b" in row["name"] and "0.4" in row["name"]] + rows[-1:]
    for row in kept[:-1]:
        row["prompts"] = 2
    few.write_text(json.dumps(kept))
    assert main(["validate", "rl", "--runs", str(few), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["compared"] == 2
    assert found["rows"][-1]["outcome"] is None
    for one in found["rows"][:2]:
        ours, theirs = one["outcome"]["step_s"], one["row"]["step_s"]
        assert one["error"] == pytest.approx(ours / theirs - 1)
    assert main(["validate", "rl", "--runs", str(few)]) == 0
    assert "not compared" in capsys.readouterr().out


def test_a_file_that_holds_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-runs"):
        read_rows(tmp_path / "no-runs.json")
