"""A run that is killed at any phase goes on with nothing lost and nothing done twice."""

import json
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.run.posttrain.rl import RLResult, run_rl
from meshwright.run.posttrain.rl.run_state import build_group_keys
from meshwright.run.posttrain.rollout import read_rollouts
from tests.run.posttrain.rl.killed import PHASES, STEPS, settings_of

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[4]


@cache
def uninterrupted(kind: str) -> RLResult:
    return run_rl(settings_of("", kind))


def same(one: RLResult, other: RLResult) -> bool:
    """Tell whether two runs came to the same weights, and adapters where they have some."""
    pairs = zip(learnt(one), learnt(other), strict=True)
    return all(torch.equal(mine, its) for mine, its in pairs)


def learnt(outcome: RLResult) -> list[torch.Tensor]:
    adapter = () if outcome.adapter is None else outcome.adapter.parameters()
    return [*outcome.decoder.parameters(), *adapter]


CASES = [(kind, phase) for kind in ("disaggregated", "async") for phase in PHASES]
# What these add lies in checkpoints, and in what is asked after them.
CASES += [
    (kind, phase)
    for kind in ("critic", "spare", "asynchronous, spare")
    for phase in ("draw", "train", "sync", "checkpoint")
]
CASES += [("colocated", "train"), ("colocated", "sync")]
CASES += [("adapter", phase) for phase in PHASES]
CASES += [("adapter, asynchronous", "train"), ("adapter, asynchronous", "sync")]


@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_a_killed_run_goes_on(tmp_path: Path, kind: str, phase: str) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.run.posttrain.rl.killed"]
    ended = subprocess.run(
        [*command, str(folder), kind, phase], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    given = settings_of(str(folder), kind)
    outcome = run_rl(given)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    drawn = [each.key for each in read_rollouts(folder / "rollouts.jsonl").rollouts]
    more = int(sum(row.get("replaced_groups", 0) for row in rows))
    assert bool(more) == bool(given.extra_prompts)
    asked = STEPS * given.prompts_per_step + more
    every = [key for group in range(asked) for key in build_group_keys(given, group)]
    assert sorted(drawn) == every
    finished = run_rl(given)
    assert not finished.step_metrics
    assert any("was finished before" in note for note in finished.notes)
    assert same(outcome, finished)
    if not given.overlaps and phase != "draw":
        # What was drawn in part is drawn in other batches, which may round otherwise.
        assert same(outcome, uninterrupted(kind))
