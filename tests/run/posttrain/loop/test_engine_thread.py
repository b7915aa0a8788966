"""The thread of an engine ends when it is to, or somebody says that it did not."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="names devices")

import torch

from meshwright.run.posttrain.loop import engine_thread
from meshwright.run.posttrain.loop.engine_thread import EngineStuck, EngineThread
from meshwright.run.posttrain.loop.spans import Spans
from meshwright.run.posttrain.rollouts.record import Key


class Stuck:
    """A stream whose turn lasts until somebody lets go."""

    def __init__(self, let_go: threading.Event) -> None:
        self.busy, self._let_go, self.begun = False, let_go, threading.Event()

    def begin(self, keys: Any, version: int, known: Any) -> None:
        del keys, version, known
        self.busy = True

    def turn(self) -> list[Any]:
        self.begun.set()
        assert self._let_go.wait(10)
        self.busy = False
        return []

    def close(self) -> None:
        """Do nothing."""


def test_a_turn_that_does_not_end_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    stream = Stuck(let_go)
    monkeypatch.setattr(engine_thread, "Stream", lambda _: stream)
    sampling: Any = SimpleNamespace(device=torch.device("cpu"), generator=None, looks=0)
    engine = EngineThread(sampling, Spans(), stall_s=0.01)
    engine.begin([Key(0, 0, 0)], 0, {})
    assert stream.begun.wait(10)
    with pytest.raises(EngineStuck, match=r"within 0\.01 s: raise stall_s"):
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
