"""`mw diff`: what changed between two runs, per step, by cost."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.timeline import write_timeline
from tests.observe.analyze.jobs import steady_job

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """A run, and one that is longer and whose kernel takes 200 µs more."""
    write_timeline(steady_job(ranks=2, steps=5), tmp_path / "a")
    slower = steady_job(ranks=2, steps=9, compute_us=lambda _rank, _step: 1100.0)
    write_timeline(slower, tmp_path / "b")
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_figures_are_per_step_so_runs_of_different_length_compare(
    pair: tuple[str, str], capsys: Captured
) -> None:
    assert main(["diff", *pair, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    worst = answer["regressions"][0]
    assert (worst["what"], worst["name"]) == ("kernel", "gemm")
    assert worst["change_ms"] == pytest.approx(0.2)
    assert worst["a_calls"] == worst["b_calls"] == 1


def test_changes_of_phases_add_up_to_the_change_of_the_step(
    pair: tuple[str, str], capsys: Captured
) -> None:
    main(["diff", *pair, "--json"])
    answer = json.loads(capsys.readouterr().out)
    total = sum(phase["change_ms"] for phase in answer["phases"])
    assert total == pytest.approx(answer["change_ms_per_step"])


def test_a_run_beside_itself_has_no_regression(pair: tuple[str, str], capsys: Captured) -> None:
    assert main(["diff", pair[0], pair[0], "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_a_slower_run_fails_where_a_limit_is_given(pair: tuple[str, str]) -> None:
    assert main(["diff", *pair, "--fail-above", "5", "-q"]) == 1
    assert main(["diff", *pair, "--fail-above", "50", "-q"]) == 0
    assert main(["diff", *pair, "--fail-above", "much"]) == 2
    assert main(["diff", *pair, "--fail-above", "nan"]) == 2


def test_an_empty_file_among_ranks_is_told(
    pair: tuple[str, str], tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "b" / "rank-00007.json").touch()
    assert main(["diff", *pair]) == 1
    assert "rank-00007.json: is empty" in capsys.readouterr().err
    assert main(["analyze", pair[1], "--json"]) == 1
    assert "rank-00007.json: is empty" in json.loads(capsys.readouterr().out)["damaged"][0]


def test_only_ranks_that_are_there_can_be_compared(pair: tuple[str, str], capsys: Captured) -> None:
    assert main(["diff", *pair, "--ranks", "7"]) == 2
    assert "name some of 0, 1" in capsys.readouterr().err


def test_a_prediction_is_held_against_a_measurement(
    pair: tuple[str, str], capsys: Captured
) -> None:
    work = Path(__file__).resolve().parents[3] / "examples" / "llama3-70b.toml"
    assert main(["diff", str(work), pair[0], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["a"]["source"] == "simulated"
    assert answer["kernels"] == []
    assert "a prediction names its own spans" in answer["notes"][0]
    assert any(row["name"] == "all_reduce" for row in answer["only_in_b"])


@pytest.mark.real
def test_the_known_pair_goes_the_known_way(shared: Path, capsys: Captured) -> None:
    folder = shared / "traces" / "modded-nanogpt" / "ab-2025-10-31"
    main(["diff", str(folder / "current.json.gz"), str(folder / "hook.json.gz"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert 3 * answer["a"]["step_ms"] == pytest.approx(181.496, abs=0.001)
    assert 3 * answer["b"]["step_ms"] == pytest.approx(180.029, abs=0.001)
    assert answer["a"]["overlap"] == pytest.approx(0.2885, abs=1e-4)
    assert answer["b"]["overlap"] == pytest.approx(0.3414, abs=1e-4)
