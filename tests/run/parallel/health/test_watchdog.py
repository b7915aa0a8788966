"""A rank that dies, hangs, raises or strays ends all others within seconds, and is named."""

import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

from meshwright.errors import InputError
from meshwright.run.parallel.algorithm_selection import AlgorithmsByGroup
from meshwright.run.parallel.health.watchdog import Watchdog
from meshwright.run.parallel.launch.exit_reason import WATCHDOG_EXIT_CODE
from meshwright.run.parallel.launch.rank_spawner import RankResult, spawn_ranks_with_results
from meshwright.run.parallel.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.timeline import read_timeline
from tests.run.parallel.mishaps import PATIENCE_S, VICTIM, suffer

RANKS = 4
BUSY_S = 4.0
"""What a machine that is busy with other things may add to the times below."""


def ends(
    folder: Path, mishap: str, within_s: float, algorithms: AlgorithmsByGroup | None = None
) -> tuple[list[RankResult], dict[int, str]]:
    """Return how all ranks ended, and the last words of those that the alarm ended."""
    outcomes = spawn_ranks_with_results(RANKS, suffer, folder, mishap, algorithms)
    began_s = float((folder / "began").read_text())
    words = {}
    for path in folder.glob("watchdog-rank-*.txt"):
        rank = int(path.stem[-5:])
        words[rank] = path.read_text()
        if rank != VICTIM:
            assert path.stat().st_mtime - began_s < within_s + BUSY_S
    for rank, outcome in enumerate(outcomes):
        if rank != VICTIM and outcome.exit_code != -signal.SIGABRT:  # gloo, of a wrong size
            assert outcome.exit_code == WATCHDOG_EXIT_CODE, (rank, outcome)
            assert words[rank].startswith(f"meshwright: rank {rank} ends: ")
            assert "mishaps.py:" in words[rank]
    return outcomes, words


@pytest.mark.parametrize("algorithms", [None, {"tp": {"all_reduce": "ring"}}])
def test_all_end_when_one_is_killed(tmp_path: Path, algorithms: AlgorithmsByGroup | None) -> None:
    outcomes, words = ends(tmp_path, "dies", within_s=1, algorithms=algorithms)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for said in words.values():
        assert "rank 1 died" in said
        assert "it was last in all_reduce sum number 2 of group dp" in said


def test_all_end_when_one_hangs_and_its_line_is_named(tmp_path: Path) -> None:
    outcomes, words = ends(tmp_path, "sleeps", within_s=PATIENCE_S + 1)
    assert outcomes[VICTIM].exit_code == WATCHDOG_EXIT_CODE
    for said in words.values():
        assert "rank 1 has not entered all_reduce sum number " in said
        assert "rank 0 waits for " in said
        assert "(_sleeps)" in said
    # What was recorded until then is not lost.
    assert {span["rank"] for span in read_timeline(tmp_path / "timeline").spans.to_pylist()} == {
        0,
        1,
        2,
        3,
    }


@pytest.mark.slow
def test_all_end_when_one_is_stopped(tmp_path: Path) -> None:
    outcomes, words = ends(tmp_path, "stops", within_s=PATIENCE_S + 1)
    assert all("rank 1" in said.partition("\n")[0] for said in words.values())
    assert outcomes[VICTIM].exit_code == WATCHDOG_EXIT_CODE, "once it goes on"


def test_all_end_at_once_when_one_raises(tmp_path: Path) -> None:
    outcomes, words = ends(tmp_path, "raises", within_s=1)
    assert isinstance(outcomes[VICTIM].error, ArithmeticError)
    for said in words.values():
        assert "rank 1 raised ArithmeticError: the loss is no number at " in said


@pytest.mark.slow
def test_all_end_when_one_leaves_early(tmp_path: Path) -> None:
    _, words = ends(tmp_path, "leaves", within_s=3)
    assert all("rank 1 has exited" in said for said in words.values())


@pytest.mark.parametrize(
    ("mishap", "theirs"),
    [
        ("takes_another_op", "all_gather number 3 of group tp"),
        ("takes_another_size", "all_reduce sum number 3 of group tp, 4,096 elements"),
    ],
)
def test_ranks_that_issue_different_collectives_are_both_named(
    tmp_path: Path, mishap: str, theirs: str
) -> None:
    _, words = ends(tmp_path, mishap, within_s=PATIENCE_S + 1)
    assert {0, 1} & set(words), "gloo aborts rank 0 for a wrong size"
    for said in words.values():
        head = said.partition("\n")[0]
        assert "ranks 0 and 1 of group tp issued different collectives" in head, head
        assert "rank 0 all_reduce sum number 3 of group tp, 8 elements" in head
        assert f"rank 1 {theirs}" in head
        assert f"(_{mishap})" in head


def test_ranks_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    _, words = ends(tmp_path, "takes_another_order", within_s=PATIENCE_S + 1)
    for said in words.values():
        head, _, rest = said.partition("\n")
        assert "wait for each other" in head or "issued different collectives" in head, said
        assert "(_takes_another_order)" in rest + head


@pytest.mark.slow
@pytest.mark.parametrize("mishap", ["is_well", "is_excused"])
def test_a_job_that_is_well_is_left_alone(tmp_path: Path, mishap: str) -> None:
    outcomes = spawn_ranks_with_results(RANKS, suffer, tmp_path, mishap)
    assert [outcome.value for outcome in outcomes] == ["done"] * RANKS
    assert not list(tmp_path.glob("watchdog-rank-*"))


def test_one_rank_needs_no_alarm() -> None:
    with Watchdog(Mesh(Layout(precision="fp32"))):
        assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_patience_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="timeout_s: 0 s"):
        Watchdog(Mesh(Layout(precision="fp32")), timeout_s=0)
