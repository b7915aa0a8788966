"""A worker that is killed at any phase is started anew: nothing is lost, nothing comes twice."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.run.posttrain.rl import RLConfig, RLResult, run_rl
from meshwright.run.posttrain.rl.config.rl_config import AdapterConfig
from meshwright.run.posttrain.rl.run_state import build_group_keys
from meshwright.run.posttrain.rollout import read_rollouts
from meshwright.run.posttrain.workers import worker_link
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.posttrain.workers.worker_pool import WorkersLostError
from tests.run.posttrain.rl.small import settings
from tests.run.posttrain.workers.dying import MODULE, PHASES

STEPS = 4


def with_workers(count: int, **given: Any) -> RLConfig:
    return settings(steps=STEPS, workers=WorkerConfig(num_workers=count, max_restarts=1), **given)


@cache
def uninterrupted(count: int) -> RLResult:
    return run_rl(with_workers(count))


def same(one: RLResult, other: RLResult) -> bool:
    pairs = zip(learnt(one), learnt(other), strict=True)
    return all(torch.equal(mine, its) for mine, its in pairs)


def learnt(outcome: RLResult) -> list[torch.Tensor]:
    adapter = () if outcome.adapter is None else outcome.adapter.parameters()
    return [*outcome.decoder.parameters(), *adapter]


def left_over() -> list[Path]:
    return list(Path("/dev/shm").glob(f"meshwright-weights-{os.getpid()}-*"))


def killed(phase: str, given: RLConfig, tmp_path: Path, patch: pytest.MonkeyPatch) -> RLResult:
    """Run with a worker that dies once; every rollout is there once afterwards."""
    marker = tmp_path / "to die"
    marker.touch()
    patch.setattr(worker_link, "WORKER_MODULE", MODULE)
    patch.setenv("DYING", f"{phase}:{marker}")
    outcome = run_rl(given)
    assert not marker.exists(), "somebody died"
    gone = [note for note in outcome.notes if "is gone" in note]
    assert len(gone) == 1
    assert "ended by SIGKILL" in gone[0]
    assert "started anew (1 of 1)" in gone[0]
    drawn = [each.key for each in read_rollouts(Path(given.folder) / "rollouts.jsonl").rollouts]
    every = [
        key
        for group in range(STEPS * given.prompts_per_step)
        for key in build_group_keys(given, group)
    ]
    assert sorted(drawn) == every
    assert len(outcome.step_metrics) == STEPS
    return outcome


def test_who_dies_while_it_draws_draws_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = with_workers(1, folder=str(tmp_path / "run"))
    outcome = killed("drawing", given, tmp_path, monkeypatch)
    assert same(outcome, run_rl(settings(steps=STEPS))), (
        "as an engine of the trainer's process does"
    )


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["disaggregated", "colocated", "async"])
@pytest.mark.parametrize("phase", PHASES)
def test_death_at_any_phase(
    phase: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = with_workers(2, folder=str(tmp_path / "run"), placement=placement)
    outcome = killed(phase, given, tmp_path, monkeypatch)
    assert not left_over()
    if placement == "async":
        assert max(row["staleness_max"] for row in outcome.step_metrics) <= 1
    else:
        assert same(outcome, uninterrupted(2))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
@pytest.mark.parametrize("phase", PHASES)
def test_who_dies_gets_the_weights_beside_an_adapter_again(
    phase: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted: dict[str, Any] = {"adapter": AdapterConfig(rank=4), "placement": placement}
    given = with_workers(2, folder=str(tmp_path / "run"), **adapted)
    outcome = killed(phase, given, tmp_path, monkeypatch)
    assert not left_over()
    assert same(outcome, run_rl(with_workers(2, **adapted)))


@pytest.mark.slow
def test_who_dies_too_often_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "to die"
    marker.touch()
    monkeypatch.setattr(worker_link, "WORKER_MODULE", MODULE)
    monkeypatch.setenv("DYING", f"drawing:{marker}")
    given = settings(workers=WorkerConfig(num_workers=1, max_restarts=0))
    with pytest.raises(WorkersLostError, match=r"ended by SIGKILL; 1 have died, 0 may: .*restarts"):
        run_rl(given)
    assert not left_over()
