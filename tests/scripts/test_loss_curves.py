"""Curves of runs beside each other: which losses are drawn, and how differences are counted."""

from pathlib import Path

import pytest

from scripts.loss_curves import WIDTH, differences_percent, main, means, picture, run_of, summary

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"


def _rows(loss: float, steps: int = 2 * WIDTH) -> list[dict[str, float | int | None]]:
    rows: list[dict[str, float | int | None]] = [
        {"step": step, "loss": loss} for step in range(1, steps + 1)
    ]
    return [*rows, {"step": steps, "eval_loss": 2 * loss}]


def test_losses_that_were_no_numbers_are_left_out() -> None:
    rows: list[dict[str, float | None]] = [
        {"step": 1, "loss": None},
        {"step": 2, "loss": 3.0},
        {"step": 2, "checkpoint_s": 1},
    ]
    run = run_of("a", rows)
    assert run.trained == [(2, 3.0)]
    assert run.held_out == []


def test_means_stand_at_their_last_step_and_a_rest_has_none() -> None:
    points = [(float(step), float(step)) for step in range(1, WIDTH + 4)]
    assert means(points) == [(WIDTH, (WIDTH + 1) / 2)]


def test_differences_are_relative_and_of_steps_that_both_have() -> None:
    assert differences_percent([(1, 3.0), (2, 1.0)], [(1, 2.0), (3, 1.0)]) == [(1, 50.0)]


def test_the_summary_names_average_most_and_held_out() -> None:
    lines = summary(run_of("b", _rows(2.02)), run_of("a", _rows(2.0)))
    assert lines == [
        f"b against a, means of {WIDTH} steps: +1.00 % on average, at most +1.00 % (to {WIDTH})",
        f"b against a, held out: +1.00 % at step {2 * WIDTH}",
    ]


def test_one_run_has_no_differences_to_draw() -> None:
    assert "difference" not in picture([run_of("a", _rows(2.0))])


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "out.svg"), "a=nowhere.jsonl"])
    assert ended.value.code == 2
    assert "a=nowhere.jsonl" in capsys.readouterr().err


def test_the_picture_of_the_guide_is_that_of_the_kept_losses(tmp_path: Path) -> None:
    runs = [f"{name}={FIGURES / f'train-135m-{name}.jsonl'}" for name in ("bf16", "fp8")]
    assert main([str(tmp_path / "out.svg"), *runs]) == 0
    assert (tmp_path / "out.svg").read_text() == (FIGURES / "train-135m.svg").read_text()
