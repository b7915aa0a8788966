"""Workers that are killed at random moments, again and again, change nothing of what is learned."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.run.posttrain.rl import RLConfig, run_rl
from meshwright.run.posttrain.rl.config.rl_config import TaskConfig, TinyModelConfig
from meshwright.run.posttrain.rl.run_state import build_group_keys
from meshwright.run.posttrain.rollout import read_rollouts
from meshwright.run.posttrain.workers import pool_startup
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.posttrain.workers.worker_link import ProcessWorkerLink
from meshwright.run.serve.worker.protocol import StartEngine
from tests.run.posttrain.rl.small import settings

STEPS, DEATHS = 12, 20
"""Deaths are counted: where a start takes longer than a life, a run would never end."""


def settings_of(folder: str, placement: str) -> RLConfig:
    return settings(
        folder=folder,
        placement=placement,
        steps=STEPS,
        prompts_per_step=8,
        task=TaskConfig(digits=4, longest=40, reward="share"),
        network=TinyModelConfig(layers=2, hidden=64, heads=2, ffn=128, max_positions=120),
        workers=WorkerConfig(num_workers=2, max_restarts=1000),
    )


@contextlib.contextmanager
def dying(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kill some worker every moment, until enough of them have died."""
    alive, over, chance = list[int](), threading.Event(), random.Random(7)

    class Doomed(ProcessWorkerLink):
        def __init__(self, start: StartEngine, patience_s: float, start_s: float) -> None:
            super().__init__(start, patience_s, start_s)
            alive.append(self.pid)

    def kill() -> None:
        left = DEATHS
        while left and not over.wait(chance.uniform(0.2, 2.0)):
            if alive:
                left -= 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(alive.pop(chance.randrange(len(alive))), signal.SIGKILL)

    patch.setattr(pool_startup, "ProcessWorkerLink", Doomed)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()
        patch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["disaggregated", "async"])
def test_deaths_at_random_moments(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings_of(str(tmp_path / "run"), placement)
    with dying(monkeypatch):
        outcome = run_rl(given)
    deaths = [note for note in outcome.notes if "is gone" in note]
    assert deaths
    drawn = [each.key for each in read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts]
    every = [
        key
        for group in range(STEPS * given.prompts_per_step)
        for key in build_group_keys(given, group)
    ]
    assert sorted(drawn) == every
    assert len(outcome.step_metrics) == STEPS
    if placement == "disaggregated":
        whole = run_rl(settings_of("", placement))
        pairs = zip(outcome.decoder.parameters(), whole.decoder.parameters(), strict=True)
        assert all(torch.equal(mine, its) for mine, its in pairs)
