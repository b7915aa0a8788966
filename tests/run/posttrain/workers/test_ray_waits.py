"""Whoever waits for a Ray actor has a deadline: a pretended Ray never answers."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="lays weights out")

import msgspec

from meshwright.errors import InputError
from meshwright.run.posttrain.workers import ray_cluster, worker_link
from meshwright.run.posttrain.workers.deadline import call_with_deadline
from meshwright.run.posttrain.workers.ray_cluster import RayWorkerCluster
from meshwright.run.posttrain.workers.ray_workers import (
    RayTimeoutError,
    RayWorkerActor,
    RayWorkerLink,
)
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.serve.client.engine_process import EngineStartTimeoutError
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.worker.protocol import EngineReady, StartEngine

START = StartEngine("nowhere", EngineConfig(device="cpu"))
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


class HangingRay(PretendedRay):
    """Does not come back from what it is called for; a cluster is never answered by itself."""

    def __init__(self, *, hangs: str) -> None:
        super().__init__()
        self.let, self._hangs = threading.Event(), hangs

    def _hang(self, what: str) -> None:
        if what == self._hangs:
            self.let.wait(60)

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: object) -> None:
        self._hang("init")

    def put(self, data: object) -> object:
        self._hang("put")
        return data

    def shutdown(self) -> None:
        self._hang("shutdown")


class Method:
    def __init__(self, returns: object) -> None:
        self._returns = returns

    def remote(self, *_: object) -> object:
        return self._returns


class Actor:
    def __init__(self, begin: object) -> None:
        self.start, self.receive_messages = Method(begin), Method(NEVER)
        self.stop = Method(None)


def link_of(ray: PretendedRay, begin: object) -> RayWorkerLink:
    pretended: Any = ray
    shelf: Any = None
    return RayWorkerLink(pretended, Actor(begin), START, shelf, patience_s=5.0, start_s=9.0)


def test_an_actor_that_never_begins_is_ended_at_its_deadline() -> None:
    ray = PretendedRay()
    with pytest.raises(
        EngineStartTimeoutError, match="ready within 9 s: look for room in the cluster"
    ):
        link_of(ray, NEVER)
    assert len(ray.killed) == 1


def test_an_actor_that_says_nothing_is_taken_to_be_gone() -> None:
    ready = {
        "ready": msgspec.to_builtins(EngineReady(64, 64, 64, [])),
        "name": "process 1 on a",
        "pid": 1,
    }
    link = link_of(PretendedRay(), msgspec.msgpack.encode(ready))
    assert list(link.receive_messages()) == []
    assert link.exit_reason() == "its Ray actor said nothing for 10 s"


def test_a_process_that_is_late_in_an_actor_is_late_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "WORKER_MODULE", "tests.run.serve.worker.stuck")
    monkeypatch.setenv("STUCK", "nothing")
    keeper = RayWorkerActor()
    told = keeper.start(msgspec.msgpack.encode(START), 5.0, 0.5)
    keeper.stop()
    ray = PretendedRay()
    with pytest.raises(EngineStartTimeoutError, match=r"not ready within 0\.5 s"):
        link_of(ray, told)
    assert len(ray.killed) == 1


def test_a_process_that_cannot_be_started_may_be_another_time() -> None:
    told = msgspec.msgpack.encode({"broken": "the engine's process ended with code 1"})
    with pytest.raises(EngineDeadError, match="code 1") as found:
        link_of(PretendedRay(), told)
    assert not isinstance(found.value, EngineStartTimeoutError)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], RayWorkerCluster]]:
    """Give a cluster of a Ray that hangs at one thing."""
    made: list[HangingRay] = []

    def cluster(hangs: str) -> RayWorkerCluster:
        made.append(HangingRay(hangs=hangs))
        monkeypatch.setattr(ray_cluster, "_ray", lambda: made[-1])
        monkeypatch.setattr(ray_cluster, "_LEAVE_S", 0.1)
        workers = WorkerConfig(num_workers=1, ray_address="10.0.0.9:6379")
        return RayWorkerCluster(workers, [START], patience_s=0.1, start_s=0.1)

    yield cluster
    for each in made:
        each.let.set()


def test_a_cluster_that_never_answers_is_refused_by_its_address(
    hanging: Callable[[str], RayWorkerCluster],
) -> None:
    with pytest.raises(InputError, match=r"no Ray cluster has answered at 10\.0\.0\.9:6379 within"):
        hanging("init")


def test_a_cluster_that_refuses_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(HangingRay):
        def init(self, **_: object) -> None:
            raise ConnectionError("ray client connection timeout\nand a stack")

    monkeypatch.setattr(ray_cluster, "_ray", lambda: Refusing(hangs=""))
    with pytest.raises(
        InputError, match=r"workers\.ray_address: ray client connection timeout \(fix"
    ):
        RayWorkerCluster(WorkerConfig(num_workers=1, ray_address="ray://a:1"), [START])


def test_a_store_that_never_takes_a_version_ends_the_wait(
    hanging: Callable[[str], RayWorkerCluster], tmp_path: Path
) -> None:
    (tmp_path / "source-0.weights").write_bytes(b"weights")

    class Lying:
        version, folder = 3, tmp_path

        def list_files(self) -> list[Path]:
            return [tmp_path / "source-0.weights"]

    offered: Any = Lying()
    with pytest.raises(
        RayTimeoutError, match=r"has not received version 3 within 0\.1 s: .*raise stall_timeout_s"
    ):
        hanging("put")._shelf.newest(offered)
    [(place, names, stored)] = hanging("nothing")._shelf.newest(offered)
    assert (place, names) == (".", ["source-0.weights"])
    assert [each.tobytes() for each in stored] == [b"weights"]


def test_a_cluster_that_cannot_be_left_is_left_behind(
    hanging: Callable[[str], RayWorkerCluster],
) -> None:
    with pytest.warns(UserWarning, match="Ray has not left its cluster within"):
        hanging("shutdown").close()


def test_what_a_call_raises_is_raised_where_it_is_waited_for() -> None:
    def breaks() -> None:
        raise KeyError("as it is")

    with pytest.raises(KeyError, match="as it is"):
        call_with_deadline(breaks, 60.0, "a call")
    assert call_with_deadline(lambda: None, 60.0, "a call") is None
