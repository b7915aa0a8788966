"""`verify_schedule` accepts schedules that can run, and names rank and action where one cannot."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.pipeline import (
    PipelineAction,
    PipelineSchedule,
    build_schedule,
    count_in_flight,
    verify_schedule,
)
from meshwright.policy.pipeline.interleaved_1f1b import get_default_group_size
from meshwright.policy.pipeline.verification import MAX_LISTED
from tests.policy.pipeline.reference import execute, schedules


def replaced(schedule: PipelineSchedule, rank: int, lane: list[PipelineAction]) -> PipelineSchedule:
    lanes = list(schedule.actions)
    lanes[rank] = tuple(lane)
    return msgspec.structs.replace(schedule, actions=tuple(lanes))


def by_hand(*lanes: str, microbatches: int = 1) -> PipelineSchedule:
    """A schedule with one chunk per rank, from words such as `F0 B0`."""
    actions: Any = [
        tuple(PipelineAction(word[0], rank, int(word[1:])) for word in lane.split())  # type: ignore[arg-type]
        for rank, lane in enumerate(lanes)
    ]
    return PipelineSchedule(
        kind="by hand",
        routes=(tuple(range(len(lanes))),),
        microbatches=microbatches,
        actions=tuple(actions),
    )


@given(schedules(most_ranks=8, most_microbatches=24))
def test_every_built_schedule_is_sound(schedule: PipelineSchedule) -> None:
    assert verify_schedule(schedule) == ()


@given(schedules(), st.data())
def test_a_limit_on_what_is_in_flight_is_kept(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    if schedule.kind.startswith("dualpipe"):
        return
    ranks, chunks = schedule.ranks, len(schedule.chunks_of(0))
    least = {"interleaved": (chunks - 1) * get_default_group_size(ranks, schedule.microbatches) + 1}
    least["zb-v"] = 2 * ((ranks + 4) // 3)
    low = least.get(schedule.kind, 1)
    limit = data.draw(st.integers(low, max(low, *count_in_flight(schedule)) + 2))
    again = build_schedule(
        schedule.kind,  # type: ignore[arg-type]
        ranks,
        schedule.microbatches,
        virtual_stages=chunks,
        max_in_flight=limit,
    )
    assert verify_schedule(again, max_in_flight=limit) == ()


@given(schedules(), st.data())
def test_a_lost_action_is_named(schedule: PipelineSchedule, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([r for r, lane in enumerate(schedule.actions) if lane]))
    lane = list(schedule.actions[rank])
    lost = lane.pop(data.draw(st.integers(0, len(lane) - 1)))
    first, *_ = verify_schedule(
        replaced(schedule, rank, [a._replace(is_concurrent=False) for a in lane])
    )
    assert first.where == f"rank {rank}"
    assert f"chunk {lost.chunk}, microbatch {lost.microbatch} is missing" in first.what


@given(schedules(), st.data())
def test_an_action_that_comes_twice_is_named(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from([r for r, lane in enumerate(schedule.actions) if lane]))
    lane = list(schedule.actions[rank])
    twice = data.draw(st.sampled_from(lane))
    lane.append(twice._replace(is_concurrent=False))
    first, *_ = verify_schedule(replaced(schedule, rank, lane))
    assert first.where == f"rank {rank}, action {len(lane) - 1}"
    assert first.what == f"{twice} for the second time"


@given(schedules(most_ranks=4), st.data())
def test_an_action_on_the_wrong_rank_is_sent_home(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    if schedule.ranks == 1:
        return
    home = data.draw(st.sampled_from([r for r, lane in enumerate(schedule.actions) if lane]))
    away = (home + 1) % schedule.ranks
    stray = data.draw(st.sampled_from(schedule.actions[home]))._replace(is_concurrent=False)
    (problem,) = verify_schedule(replaced(schedule, away, [stray, *schedule.actions[away]]))
    assert problem.where == f"rank {away}, action 0"
    assert problem.fix == f"move it to rank {home}"


@given(schedules(most_ranks=4, most_microbatches=6), st.randoms(use_true_random=False))
def test_a_shuffled_rank_is_refused_exactly_where_it_cannot_run(
    schedule: PipelineSchedule, random: Any
) -> None:
    plain = [[a._replace(is_concurrent=False) for a in lane] for lane in schedule.actions]
    rank = random.randrange(schedule.ranks)
    random.shuffle(plain[rank])
    shuffled = msgspec.structs.replace(schedule, actions=tuple(tuple(lane) for lane in plain))
    problems = verify_schedule(shuffled)
    assert (problems == ()) == execute(shuffled).finished
    assert all("deadlock" in problem.what for problem in problems)


@given(schedules(most_ranks=5, most_microbatches=8), st.data())
def test_swapped_neighbours_are_refused_exactly_where_they_cannot_run(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    plain = [[a._replace(is_concurrent=False) for a in lane] for lane in schedule.actions]
    for _ in range(data.draw(st.integers(1, 3))):
        lane = data.draw(st.sampled_from([lane for lane in plain if len(lane) > 1]))
        index = data.draw(st.integers(0, len(lane) - 2))
        lane[index], lane[index + 1] = lane[index + 1], lane[index]
    swapped = msgspec.structs.replace(schedule, actions=tuple(tuple(lane) for lane in plain))
    assert (verify_schedule(swapped) == ()) == execute(swapped).finished


def test_a_backward_before_its_forward_names_both() -> None:
    (problem,) = verify_schedule(by_hand("F0 B0", "B0 F0"))
    assert problem.where == "rank 1, action 0"
    assert problem.what == (
        "deadlock: rank 1 waits at action 0 (B of chunk 1, microbatch 0) for action 1 of the same "
        "rank (F of chunk 1, microbatch 0)"
    )


def test_a_deadlock_between_two_ranks_names_both() -> None:
    # Rank 0 wants the backward of microbatch 0 first, rank 1 does microbatch 1 first.
    (problem,) = verify_schedule(by_hand("F0 B0 F1 B1", "F1 B1 F0 B0", microbatches=2))
    assert "rank 0 waits at action 1 (B of chunk 0, microbatch 0) for action 3 of rank 1" in (
        problem.what
    )
    assert "rank 1 waits at action 0 (F of chunk 1, microbatch 1) for action 2 of rank 0" in (
        problem.what
    )


def test_of_several_circles_the_shortest_is_told() -> None:
    # Ranks 0 and 1 wait for each other; rank 2 waits for itself.
    (problem,) = verify_schedule(
        by_hand("F0 B0 F1 B1", "F1 B1 F0 B0", "B0 F0 F1 B1", microbatches=2)
    )
    assert problem.where == "rank 2, action 0"
    assert problem.what.count("waits") == 1


def test_overlapping_a_forward_with_its_own_backward_is_refused() -> None:
    lane = (PipelineAction("F", 0, 0), PipelineAction("B", 0, 0, is_concurrent=True))
    (problem,) = verify_schedule(
        PipelineSchedule(kind="x", routes=((0,),), microbatches=1, actions=(lane,))
    )
    assert problem.where == "rank 0, action 0"


def test_only_a_forward_and_a_backward_may_overlap() -> None:
    lane = (
        PipelineAction("F", 0, 0),
        PipelineAction("F", 0, 1, is_concurrent=True),
        PipelineAction("B", 0, 0),
        PipelineAction("B", 0, 1),
    )
    (problem,) = verify_schedule(
        PipelineSchedule(kind="x", routes=((0,),), microbatches=2, actions=(lane,))
    )
    assert (problem.where, problem.what) == ("rank 0, action 0", "F, F start together")


def test_the_first_action_cannot_be_joined() -> None:
    lane = (PipelineAction("F", 0, 0, is_concurrent=True), PipelineAction("B", 0, 0))
    (problem,) = verify_schedule(
        PipelineSchedule(kind="x", routes=((0,),), microbatches=1, actions=(lane,))
    )
    assert problem.where == "rank 0, action 0"


@pytest.mark.parametrize(
    ("lane", "what"),
    [
        ("F0", "the backward of chunk 0, microbatch 0 is missing"),
        ("B0", "F of chunk 0, microbatch 0 is missing"),
        ("F0 I0", "W of chunk 0, microbatch 0 is missing beside I"),
        ("F0 W0", "I of chunk 0, microbatch 0 is missing beside W"),
        ("F0 B0 W0", "chunk 0, microbatch 0 runs W beside B"),
        ("F0 B0 I0 W0", "chunk 0, microbatch 0 runs I and W beside B"),
    ],
)
def test_half_a_pass_is_named(lane: str, what: str) -> None:
    (problem,) = verify_schedule(by_hand(lane))
    assert problem.what == what


@pytest.mark.parametrize("word", ["F1", "X0"])
def test_what_does_not_exist_is_named(word: str) -> None:
    (problem,) = verify_schedule(by_hand(f"F0 B0 {word}"))
    assert problem.where == "rank 0, action 2"


def test_a_chunk_on_a_rank_that_does_not_exist_is_named() -> None:
    schedule = msgspec.structs.replace(by_hand("F0 B0"), routes=((1,), (0, 0)))
    wheres = [problem.where for problem in verify_schedule(schedule)]
    assert wheres == ["routes[0][0]", "routes[1]"]


def test_nothing_at_all_is_not_a_schedule() -> None:
    empty = PipelineSchedule(kind="x", routes=(), microbatches=0, actions=())
    assert [p.where for p in verify_schedule(empty)] == ["microbatches", "actions", "routes"]


def test_a_rank_that_holds_too_much_is_named() -> None:
    problems = verify_schedule(build_schedule("1f1b", 4, 8), max_in_flight=3)
    assert [(p.where, p.what) for p in problems] == [
        ("rank 0", "holds 4 chunk-microbatches, more than 3")
    ]


def test_a_flood_of_problems_is_counted() -> None:
    problems = verify_schedule(
        msgspec.structs.replace(build_schedule("1f1b", 2, 40), actions=((), ()))
    )
    assert len(problems) == MAX_LISTED + 1
    assert problems[-1].what == f"{2 * 2 * 40 - MAX_LISTED} more problems like these"
