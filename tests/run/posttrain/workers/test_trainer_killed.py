"""Where the trainer is killed its workers end with it, and the same call goes on."""

import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.run_state import build_group_keys
from meshwright.run.posttrain.rollout import read_rollouts
from tests.run.posttrain.rl.killed import STEPS
from tests.run.posttrain.workers.killed import settings_of

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[4]


@cache
def uninterrupted() -> Decoder:
    return run_rl(settings_of("")).decoder


def killed(module: str, *given: str) -> None:
    """Run a trainer that kills itself; return when its workers and weights are gone."""
    command = [sys.executable, "-m", module, *given]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    trainer, *pids = [int(line) for line in ended.stdout.splitlines()]
    assert len(pids) == 2
    until_s, named = time.monotonic() + 60, f"meshwright-weights-{trainer}-*"
    while any(Path(f"/proc/{pid}").exists() for pid in pids) or any(Path("/dev/shm").glob(named)):
        assert time.monotonic() < until_s, "workers outlive their trainer, or leave weights behind"
        time.sleep(0.1)


def test_workers_that_speak_to_a_dead_trainer_leave_no_weights_behind() -> None:
    killed("tests.run.posttrain.workers.late")


@pytest.mark.parametrize("phase", ["draw", "train", "sync", "row", "checkpoint"])
def test_workers_end_with_their_trainer_and_the_run_goes_on(tmp_path: Path, phase: str) -> None:
    folder = tmp_path / "run"
    killed("tests.run.posttrain.workers.killed", str(folder), phase)
    given = settings_of(str(folder))
    outcome = run_rl(given)
    drawn = [each.key for each in read_rollouts(folder / "rollouts.jsonl").rollouts]
    every = [
        key
        for group in range(STEPS * given.prompts_per_step)
        for key in build_group_keys(given, group)
    ]
    assert sorted(drawn) == every
    if phase != "draw":
        # What was drawn in part is drawn in other batches, which may round otherwise.
        pairs = zip(outcome.decoder.parameters(), uninterrupted().parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
