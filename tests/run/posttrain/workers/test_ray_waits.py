"""Whoever waits for a Ray actor has a deadline: a pretended Ray never answers."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="lays weights out")

import msgspec

from meshwright.run.posttrain.workers import links
from meshwright.run.posttrain.workers.ray_workers import Keeper, RayLink
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.interface import EngineBroken
from meshwright.run.serve.worker.frames import Ready, Start
from meshwright.run.serve.worker.launch import NotStarted

START = Start("nowhere", EngineSettings(device="cpu"))
NEVER = object()


class _RayError(Exception):
    pass


class _GetTimeoutError(_RayError, TimeoutError):
    pass


class _Exceptions:
    RayError, GetTimeoutError = _RayError, _GetTimeoutError


class PretendedRay:
    """Gives what actors return; it waits for nobody."""

    exceptions = _Exceptions

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def get(self, said: object, timeout: float | None = None) -> object:
        assert timeout is not None, "this would wait for ever"
        if said is NEVER:
            raise _GetTimeoutError(f"not within {timeout} s")
        return said

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


class Method:
    def __init__(self, returns: object) -> None:
        self._returns = returns

    def remote(self, *_: object) -> object:
        return self._returns


class Actor:
    def __init__(self, begin: object) -> None:
        self.begin, self.heard, self.end = Method(begin), Method(NEVER), Method(None)


def link_of(ray: PretendedRay, begin: object) -> RayLink:
    pretended: Any = ray
    shelf: Any = None
    return RayLink(pretended, Actor(begin), START, shelf, patience_s=5.0, start_s=9.0)


def test_an_actor_that_never_begins_is_ended_at_its_deadline() -> None:
    ray = PretendedRay()
    with pytest.raises(NotStarted, match="ready within 9 s: look for room in the cluster"):
        link_of(ray, NEVER)
    assert len(ray.killed) == 1


def test_an_actor_that_says_nothing_is_taken_to_be_gone() -> None:
    ready = {
        "ready": msgspec.to_builtins(Ready(64, 64, 64, [])),
        "name": "process 1 on a",
        "pid": 1,
    }
    link = link_of(PretendedRay(), msgspec.msgpack.encode(ready))
    assert list(link.heard()) == []
    assert link.last_words() == "its Ray actor said nothing for 10 s"


def test_a_process_that_is_late_in_an_actor_is_late_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MODULE", "tests.run.serve.worker.stuck")
    monkeypatch.setenv("STUCK", "nothing")
    keeper = Keeper()
    told = keeper.begin(msgspec.msgpack.encode(START), 5.0, 0.5)
    keeper.end()
    ray = PretendedRay()
    with pytest.raises(NotStarted, match=r"not ready within 0\.5 s"):
        link_of(ray, told)
    assert len(ray.killed) == 1


def test_a_process_that_cannot_be_started_may_be_another_time() -> None:
    told = msgspec.msgpack.encode({"broken": "the engine's process ended with code 1"})
    with pytest.raises(EngineBroken, match="code 1") as found:
        link_of(PretendedRay(), told)
    assert not isinstance(found.value, NotStarted)
