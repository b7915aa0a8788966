"""The thread of an engine ends when it is to, or somebody says that it did not."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="names devices")

import torch

from meshwright.run.posttrain.rl.generation import threaded_rollout_engine
from meshwright.run.posttrain.rl.generation.threaded_rollout_engine import (
    EngineThreadTimeoutError,
    ThreadedRolloutEngine,
)
from meshwright.run.posttrain.rl.timeline_recorder import RLTimelineRecorder
from meshwright.run.posttrain.rollout.rollout import RolloutKey


class Stuck:
    """A stream whose turn lasts until somebody lets go."""

    def __init__(self, let_go: threading.Event) -> None:
        self.is_busy, self._let_go, self.begun = False, let_go, threading.Event()

    def submit(self, keys: Any, version: int, known: Any) -> None:
        del keys, version, known
        self.is_busy = True

    def run_step(self) -> list[Any]:
        self.begun.set()
        assert self._let_go.wait(10)
        self.is_busy = False
        return []

    def close(self) -> None:
        """Do nothing."""


def test_a_turn_that_does_not_end_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    stream = Stuck(let_go)
    monkeypatch.setattr(threaded_rollout_engine, "RolloutStream", lambda _: stream)
    sampling: Any = SimpleNamespace(
        device=torch.device("cpu"), generator=None, health_check_count=0
    )
    engine = ThreadedRolloutEngine(sampling, RLTimelineRecorder(), stall_timeout_s=0.01)
    engine.submit([RolloutKey(0, 0, 0)], 0, {})
    assert stream.begun.wait(10)
    with pytest.raises(EngineThreadTimeoutError, match=r"within 0\.01 s: raise stall_timeout_s"):
        engine.close()

    def faulty() -> None:
        try:
            raise ZeroDivisionError
        finally:
            engine.close()

    with (
        pytest.warns(UserWarning, match="has not ended its turn"),
        pytest.raises(ZeroDivisionError),
    ):
        faulty()
    let_go.set()
    engine.close()
