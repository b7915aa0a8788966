"""Workers as one engine: who is asked what, and what becomes of it where one dies."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="lays weights out")

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import GenerateAction
from meshwright.predict.rl.rl_framework import MESHWRIGHT
from meshwright.predict.rl.rl_setup import GroupLengths
from meshwright.predict.rl.rollout_engines import RolloutEngines
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.sim.serving_fleet import (
    ReplicaPool,
    build_engines,
    default_scheduler_config,
)
from meshwright.run.posttrain.workers import worker_link
from meshwright.run.posttrain.workers.pool_startup import start_worker_pool
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.posttrain.workers.worker_main import SOURCES, TAKE
from meshwright.run.posttrain.workers.worker_pool import WorkersLostError
from meshwright.run.serve.client.engine_process import EngineStartTimeoutError
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.worker.protocol import (
    AbortRequest,
    AddRequests,
    EngineHeartbeat,
    RequestRejected,
    UtilityCall,
)
from meshwright.spec import catalog
from tests.run.posttrain.workers.pretend import Staged
from tests.run.serve.model.small import small


@pytest.fixture
def staged() -> Iterator[Callable[..., Staged]]:
    made = []

    def make(**given: Any) -> Staged:
        made.append(Staged(**given))
        return made[-1]

    yield make
    for each in made:
        each.fleet.close()
        assert not each.offered.folder.exists()


def test_a_group_is_drawn_by_one_worker_and_asked_at_once(staged: Callable[..., Staged]) -> None:
    stage = staged()
    stage.ask(10, 11, near=4)
    stage.ask(20, 21, near=5)
    stage.ask(30, near=6)
    assert not stage.now(0).asked, "nothing is sent before the next turn"
    stage.turn()
    assert stage.now(0).asked == [[10, 11, 30]]
    assert stage.now(1).asked == [[20, 21]]
    stage.now(1).answer(21)
    stage.now(0).answer(10, 11, 30)
    stage.now(1).answer(20)
    while not stage.fleet.is_idle:
        stage.turn()
    stage.turn()
    assert sorted(stage.heard) == [(each, "stop") for each in (10, 11, 20, 21, 30)]


def test_a_simulation_asks_the_engines_that_the_fleet_asks(staged: Callable[..., Staged]) -> None:
    stage = staged(count=3)
    replica = Replica(
        model=catalog.get_model("llama3.1-8b"), cluster=catalog.get_cluster("h100-superpod")
    )
    copies = ReplicaPool(
        replica=replica, scheduler_config=default_scheduler_config(replica), count=3
    )
    simulated = RolloutEngines(
        build_engines(copies, 100.0), lambda *_: None, MESHWRIGHT.sample_assignment
    )
    for group in (0, 1, 2, 5, 7, 4):
        tickets = stage.ask(*range(100 * group, 100 * group + 8), near=group)
        simulated.submit(GenerateAction(group, 0, 0), GroupLengths(16, (10,) * 8), 0.0)
        left = simulated._left[GenerateAction(group, 0, 0)]
        assert [each.state.engine for each in left] == [each.worker_index for each in tickets]
        assert len({each.worker_index for each in tickets}) == 1
    stage.fleet.abort(stage.fleet._pending)


@pytest.mark.parametrize(("exact", "again"), [(False, [[12, 13]]), (True, [[10, 11, 12], [13]])])
def test_what_a_dead_worker_had_is_drawn_again_once(
    staged: Callable[..., Staged], exact: bool, again: list[list[int]]
) -> None:
    stage = staged(exact=exact)
    stage.fleet.load_version(1)
    stage.ask(10, 11, 12, near=0)
    stage.ask(20, near=1)
    stage.turn()
    stage.ask(13, near=0)
    stage.turn()
    stage.now(0).answer(10, 11)
    stage.now(0).die()
    stage.until_life(0, 2)
    anew = stage.now(0)
    assert anew.asked == again
    order = [each.method if isinstance(each, UtilityCall) else type(each) for each in anew.messages]
    assert order[:3] == [SOURCES, TAKE, AddRequests], "it has the present weights before it draws"
    anew.answer(*(each for frame in again for each in frame))
    stage.now(1).answer(20)
    while not stage.fleet.is_idle:
        stage.turn()
    stage.turn()
    assert sorted(stage.heard) == [(each, "stop") for each in (10, 11, 12, 13, 20)]
    assert stage.fleet.restart_count == 1
    assert stage.said == [
        "rollout worker 0 (pretend 0) is gone with 2 running requests: it was told to die; "
        "it is started anew (1 of 2)"
    ]
    assert len(stage.lives[1]) == 1, "nobody else was touched"


def test_a_version_reaches_all_also_who_dies_meanwhile(staged: Callable[..., Staged]) -> None:
    stage = staged()
    stage.fleet.load_version(1)
    stage.now(1).die()
    stage.fleet.load_version(2)
    assert len(stage.lives[1]) == 2
    versions = [each.version for each in stage.now(1).messages if isinstance(each, UtilityCall)]
    assert versions[-1] == 2
    assert [path.name for path in stage.offered.folder.iterdir()] == ["version-2"]
    stage.ask(1, near=0)
    with pytest.raises(InputError, match="running"):
        stage.fleet.load_version(3)
    stage.fleet.abort(stage.fleet._pending)


def test_cancelled_answers_of_the_dead_end(staged: Callable[..., Staged]) -> None:
    stage = staged()
    first = stage.ask(10, 11, near=0)
    stage.turn()
    unsent = stage.ask(12, near=0)
    stage.fleet.abort([first[0], *unsent])
    stage.fleet.abort([first[0]])
    assert isinstance(stage.now(0).messages[-1], AbortRequest)
    stage.now(0).die()
    stage.until_life(0, 2)
    assert stage.now(0).asked == [[11]]
    assert sorted(stage.heard) == [(10, "abort"), (12, "abort")]
    stage.fleet.abort(first)


def test_who_dies_asleep_is_started_when_all_wake(
    staged: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged()
    posted = stage.offered.publish

    def post(version: int) -> None:
        assert not any(each.pending_calls for each in stage.fleet._workers), (
            "the old version is at hand"
        )
        posted(version)

    monkeypatch.setattr(stage.offered, "publish", post)
    stage.fleet.load_version(1)
    stage.fleet.sleep()
    stage.now(0).die()
    while not stage.said:
        stage.turn()
    assert len(stage.lives[0]) == 1, "the trainer has the memory"
    stage.fleet.load_version(2)
    # A process begins with all its memory, of which the cache is not to be there yet.
    assert stage.now(0).calls == [SOURCES, "sleep", "wake", TAKE, TAKE]
    assert stage.now(1).calls == [SOURCES, TAKE, "sleep", "wake", TAKE]


def test_new_weights_come_before_the_cache_wakes_also_to_who_dies_then(
    staged: Callable[..., Staged],
) -> None:
    def woken(number: int) -> list[tuple[str, tuple[str, ...]]]:
        calls = [each for each in stage.now(number).messages if isinstance(each, UtilityCall)]
        return [(each.method, each.memory_tags if each.method == "wake" else ()) for each in calls]

    stage = staged()
    stage.fleet.load_version(1)
    stage.fleet.sleep()
    stage.fleet.load_version(2)
    stage.now(0).die()
    stage.until_life(0, 2)
    stage.fleet.wake_up()
    stage.fleet.wake_up()
    halves = [("wake", ("weights",)), (TAKE, ()), ("wake", ("cache",))]
    assert woken(1) == [(SOURCES, ()), (TAKE, ()), ("sleep", ()), *halves]
    assert woken(0) == [(SOURCES, ()), ("sleep", ()), *halves]
    stage.now(0).die()
    stage.until_life(0, 3)
    assert woken(0) == [(SOURCES, ()), (TAKE, ())], "all are awake, and so is who begins"


def test_too_many_deaths_end_the_run(staged: Callable[..., Staged]) -> None:
    stage = staged(max_restarts=1)
    stage.ask(10, near=0)
    stage.turn()
    stage.now(0).die()
    stage.until_life(0, 2)
    stage.now(0).die()
    with pytest.raises(
        WorkersLostError, match=r"told to die; 2 have died, 1 may: .*workers\.max_restarts"
    ):
        stage.turn(1000)
    assert stage.fleet.is_idle, "who closes it waits for nothing"


def test_who_fails_at_a_change_is_replaced_and_the_note_says_why(
    staged: Callable[..., Staged],
) -> None:
    stage = staged()
    stage.ask(10, near=1)
    stage.turn()
    stage.now(1).say(RequestRejected(7, [], engine_error="version 3 broke off"))
    stage.until_life(1, 2)
    assert stage.lives[1][0].gone.is_set()
    assert "(pretend 1) is gone with 1 running requests: version 3 broke off" in stage.said[0]


@pytest.mark.parametrize("others_talk", [False, True])
def test_who_does_nothing_is_ended_and_replaced(
    staged: Callable[..., Staged], others_talk: bool
) -> None:
    stage = staged()
    stage.ask(10, near=1)
    stage.turn()
    stage.fleet._workers[1].last_progress_s -= 61
    if others_talk:
        stage.now(0).say(EngineHeartbeat(EngineStats(steps=1)))
        assert stage.fleet._hear(60), "the other one says something"
        assert stage.said
    stage.until_life(1, 2)
    assert stage.lives[1][0].gone.is_set()
    assert "(pretend 1) is gone with 1 running requests: it did nothing for" in stage.said[0]
    stage.now(1).answer(10)
    while not stage.heard:
        stage.turn()
    assert stage.heard == [(10, "stop")]


def test_who_comes_up_while_all_are_ended_is_ended_too(staged: Callable[..., Staged]) -> None:
    stage = staged()
    stage.now(0).die()
    while len(stage.lives[0]) < 2:
        if not stage.said:
            stage.turn()
    stage.fleet.close()
    assert stage.now(0).gone.wait(60)


def test_who_never_starts_is_named() -> None:
    class Endless(Staged):
        def _hire(self, number: int) -> Any:
            threading.Event().wait()
            return super()._hire(number)

    with pytest.raises(
        WorkersLostError, match=r"worker 0 has not started within 0\.1 s: look for room"
    ):
        Endless(count=1, stall_timeout_s=0.1)


def test_who_is_ended_at_the_deadline_of_its_start_is_not_started_anew() -> None:
    class Late(Staged):
        def _hire(self, number: int) -> Any:
            raise EngineStartTimeoutError(f"process {number} was not ready")

    with pytest.raises(
        WorkersLostError, match=r"worker 0 has not started within 60 s: .*stall_timeout_s"
    ):
        Late(count=1)


def test_the_process_of_a_worker_has_the_deadline_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "WORKER_MODULE", "tests.run.serve.worker.stuck")
    monkeypatch.setenv("STUCK", "nothing")
    engine = EngineConfig(device="cpu")
    with pytest.raises(WorkersLostError, match="worker 0 has not started within 1 s") as found:
        start_worker_pool(
            small(), "nowhere", engine, WorkerConfig(num_workers=1),
            threads=1, stall_timeout_s=1.0, exact=False, say=print,
        )  # fmt: skip
    assert isinstance(found.value.__cause__, EngineStartTimeoutError), "its process was ended first"


def test_what_a_worker_refuses_is_raised(staged: Callable[..., Staged]) -> None:
    stage = staged()
    stage.now(1).say(RequestRejected(3, [("weights", "bucket 2 was damaged", "send it again")]))
    with pytest.raises(InputError, match="rollout worker 1: weights: bucket 2 was damaged"):
        stage.turn(1000)


def test_what_keeps_the_first_workers_from_starting_is_told() -> None:
    class Broken(Staged):
        def _hire(self, number: int) -> Any:
            if number or len(self.said) == 2:
                raise InputError([Problem("device", "there is none", "use cpu")])
            raise EngineDeadError("it fell over")

    with pytest.raises(InputError, match="there is none"):
        Broken()
    with pytest.raises(
        WorkersLostError, match="is gone while it started: it fell over; 2 have died"
    ):
        Broken(count=1, max_restarts=1)


def test_settings_without_workers_say_nothing_of_them() -> None:
    with pytest.raises(InputError, match="there are no workers"):
        WorkerConfig(tensor_parallel_size=2)
    with pytest.raises(InputError, match="restarts"):
        WorkerConfig(num_workers=1, max_restarts=-1)
