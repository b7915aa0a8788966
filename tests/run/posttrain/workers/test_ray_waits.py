"""Whoever waits for a Ray actor has a deadline: a pretended Ray never answers."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="lays weights out")

import msgspec

from meshwright.errors import InputError
from meshwright.run.posttrain.workers import links, ray_workers
from meshwright.run.posttrain.workers.in_time import in_time
from meshwright.run.posttrain.workers.ray_workers import Cluster, ClusterStuck, Keeper, RayLink
from meshwright.run.posttrain.workers.settings import WorkerSettings
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


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Cluster]]:
    """Give a cluster of a Ray that hangs at one thing."""
    made: list[HangingRay] = []

    def cluster(hangs: str) -> Cluster:
        made.append(HangingRay(hangs=hangs))
        monkeypatch.setattr(ray_workers, "_ray", lambda: made[-1])
        monkeypatch.setattr(ray_workers, "_LEAVE_S", 0.1)
        workers = WorkerSettings(count=1, ray="10.0.0.9:6379")
        return Cluster(workers, [START], patience_s=0.1, start_s=0.1)

    yield cluster
    for each in made:
        each.let.set()


def test_a_cluster_that_never_answers_is_refused_by_its_address(
    hanging: Callable[[str], Cluster],
) -> None:
    with pytest.raises(InputError, match=r"no Ray cluster has answered at 10\.0\.0\.9:6379 within"):
        hanging("init")


def test_a_cluster_that_refuses_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(HangingRay):
        def init(self, **_: object) -> None:
            raise ConnectionError("ray client connection timeout\nand a stack")

    monkeypatch.setattr(ray_workers, "_ray", lambda: Refusing(hangs=""))
    with pytest.raises(InputError, match=r"workers\.ray: ray client connection timeout \(fix"):
        Cluster(WorkerSettings(count=1, ray="ray://a:1"), [START])


def test_a_store_that_never_takes_a_version_ends_the_wait(
    hanging: Callable[[str], Cluster], tmp_path: Path
) -> None:
    (tmp_path / "source-0.weights").write_bytes(b"weights")

    class Lying:
        version, folder = 3, tmp_path

        def files(self) -> list[Path]:
            return [tmp_path / "source-0.weights"]

    offered: Any = Lying()
    with pytest.raises(ClusterStuck, match=r"not taken version 3 within 0\.1 s: .*raise stall_s"):
        hanging("put")._shelf.newest(offered)
    [(place, names, stored)] = hanging("nothing")._shelf.newest(offered)
    assert (place, names) == (".", ["source-0.weights"])
    assert [each.tobytes() for each in stored] == [b"weights"]


def test_a_cluster_that_cannot_be_left_is_left_behind(hanging: Callable[[str], Cluster]) -> None:
    with pytest.warns(UserWarning, match="Ray has not left its cluster within"):
        hanging("shutdown").close()


def test_what_a_call_raises_is_raised_where_it_is_waited_for() -> None:
    def breaks() -> None:
        raise KeyError("as it is")

    with pytest.raises(KeyError, match="as it is"):
        in_time(breaks, 60.0, "a call")
    assert in_time(lambda: None, 60.0, "a call") is None
