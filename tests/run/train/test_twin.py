"""What others use of a machine is told apart from what ranks use."""

import time

import pytest

pytest.importorskip("torch", reason="is a part of the trainer")

from meshwright.run.train.twin import beside as counting
from meshwright.run.train.twin.beside import Beside


def test_cores_of_others_are_what_ranks_did_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = iter((10.0, 14.0)), iter((100.0, 107.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    monkeypatch.setattr(counting, "busy_s", lambda: next(busy))
    # Of 7 busy seconds ranks took 5: others had 2 in 4 seconds.
    assert Beside().cores(5.0) == pytest.approx(0.5)


def test_nothing_is_said_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "busy_s", lambda: None)
    assert Beside().cores(0.0) is None
