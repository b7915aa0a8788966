"""Published steps of reinforcement learning beside ours."""

import json
from pathlib import Path

import msgspec
import pytest

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.predict.validation.rl_score import (
    PROMPT_TOKENS,
    build_setup,
    build_sync_setup,
    fit_truncated_lengths,
    read_rl_runs,
    score_rl_run,
)

RUNS = Path(__file__).parents[3] / "validation/rl/runs.json"


def test_every_row_is_either_predicted_or_says_why_not() -> None:
    rows = read_rl_runs(RUNS)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        if row.not_comparable:
            assert score_rl_run(row).metrics is None
            continue
        if row.step_s is None:
            assert row.sync_s
            setup = build_sync_setup(row)
            assert setup.trainer_layout.gpus == row.gpus - (row.rollout_gpus or 0)
            assert {
                name: getattr(setup.trainer_layout, name) for name in row.trainer
            } == row.trainer
            continue
        setup = build_setup(row)
        assert setup.gpus == row.gpus
        assert {name: getattr(setup.trainer_layout, name) for name in row.trainer} == row.trainer
        assert setup.trainer_layout.recompute == row.recompute
        assert setup.trainer_layout.recompute_layers is None
        assert setup.rollout_pool.scheduler_config.max_num_seqs == (
            128 if row.async_engine else 1024
        )
        assert row.tokens_per_s_per_gpu
        # What was printed agrees with itself, answers with their prompts; two rows by 17 % only.
        tokens = row.prompts * row.samples * (row.mean_tokens + PROMPT_TOKENS)
        printed = row.tokens_per_s_per_gpu * row.step_s * row.gpus
        odd = "235b" in row.name and "1-step" in row.name
        assert printed == pytest.approx(tokens, rel=0.17 if odd else 0.02)


def test_a_sync_that_is_told_alone_is_held_against_our_plan() -> None:
    rows = [row for row in read_rl_runs(RUNS) if row.step_s is None and not row.not_comparable]
    scored = {row.name: score_rl_run(row) for row in rows}
    assert len(scored) == 5
    # A plan's price is a bound for wires and memory.
    assert all(one.sync_error is not None and one.sync_error < 0 for one in scored.values())


def test_layers_that_stages_cannot_share_evenly_leave_less_for_the_last() -> None:
    row = next(row for row in read_rl_runs(RUNS) if "deepseek" in row.name)
    bare = msgspec.structs.replace(row, stage_layers=None)
    assert build_setup(bare).trainer_layout.stage_layers == (4,) * 13 + (3,) * 3


def test_lengths_are_spread_around_the_mean_that_was_printed() -> None:
    assert fit_truncated_lengths(900, 3936).mean() == pytest.approx(900, rel=1e-3)
    assert fit_truncated_lengths(3000, 3936).mean() == pytest.approx(3000, rel=1e-3)
    with pytest.raises(InputError, match="is not below the longest"):
        fit_truncated_lengths(4000, 3936)


def test_the_command_shows_both_and_lists_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(RUNS.read_text())
    few = tmp_path / "runs.json"
    unlike = next(row for row in rows if row.get("not_comparable"))
    kept = [row for row in rows if "235b" in row["name"] and "0.4" in row["name"]]
    kept += [rows[-1], unlike]
    for row in kept[:2]:
        row["prompts"] = 2
    few.write_text(json.dumps(kept))
    assert main(["validate", "rl", "--runs", str(few), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["compared"] == 3
    assert found["rows"][2]["sync_error"] < 0
    assert found["rows"][-1]["outcome"] is None
    for one in found["rows"][:2]:
        ours, theirs = one["outcome"]["step_s"], one["row"]["step_s"]
        assert one["error"] == pytest.approx(ours / theirs - 1)
    assert main(["validate", "rl", "--runs", str(few)]) == 0
    shown = capsys.readouterr().out
    assert "not compared" in shown
    assert "shard to shard" in shown


def test_a_file_that_holds_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-runs"):
        read_rl_runs(tmp_path / "no-runs.json")
