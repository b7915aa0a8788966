"""`build_schedule` makes every kind for any numbers that fit, and lists all that do not."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy import pipeline
from meshwright.policy.pipeline import (
    PipelineAction,
    PipelineSchedule,
    add_transfers,
    build_layout_schedule,
    build_schedule,
    count_in_flight,
    find_activation_peaks,
    verify_schedule,
)
from meshwright.policy.pipeline.interleaved_1f1b import (
    build_interleaved_actions,
    get_default_group_size,
)
from meshwright.policy.pipeline.rank_writer import ScheduleParams
from meshwright.policy.pipeline.schedule_builder import ACTION_WRITERS
from meshwright.spec.layout import Layout, list_chunks_by_rank
from meshwright.spec.layout.choices import CHOICES, MULTI_CHUNK_SCHEDULES
from tests.policy.pipeline.reference import schedules


def refused(*args: Any, **values: Any) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        build_schedule(*args, **values)
    return {problem.where: problem.fix for problem in caught.value.problems}


def unchecked(asked: ScheduleParams) -> PipelineSchedule:
    """The interleaved schedule that `build_schedule` would refuse to write."""
    sound = build_schedule(
        "interleaved", asked.ranks, asked.microbatches, virtual_stages=asked.virtual_stages
    )
    lanes = tuple(build_interleaved_actions(rank, asked) for rank in range(asked.ranks))
    return msgspec.structs.replace(sound, actions=lanes)


def test_every_kind_a_layout_knows_can_be_built() -> None:
    assert set(ACTION_WRITERS) == CHOICES["schedule"]


def test_the_public_names_are_sorted_and_load() -> None:
    assert list(pipeline.__all__) == sorted(pipeline.__all__)
    assert all(hasattr(pipeline, name) for name in pipeline.__all__)
    assert dir(pipeline) == list(pipeline.__all__)


@given(schedules())
def test_chunks_lie_where_the_layout_puts_them(schedule: PipelineSchedule) -> None:
    kind: Any = schedule.kind
    virtual = len(schedule.chunks_of(0)) if kind in MULTI_CHUNK_SCHEDULES else 1
    layout = Layout(pp=schedule.ranks, virtual_stages=virtual, schedule=kind)
    held = list_chunks_by_rank(layout, layout.chunks)
    for rank, chunks in enumerate(held):
        assert schedule.chunks_of(rank) == tuple(chunk.position for chunk in chunks)


def test_a_layout_gives_its_schedule() -> None:
    layout = Layout(tp=2, pp=4, virtual_stages=2, schedule="interleaved")
    assert build_layout_schedule(layout, 8) == build_schedule("interleaved", 4, 8, virtual_stages=2)


@pytest.mark.parametrize("kind", sorted(ACTION_WRITERS))
def test_one_rank_runs_every_microbatch_there_and_back(kind: Any) -> None:
    schedule = build_schedule(kind, 1, 3)
    assert verify_schedule(schedule) == ()
    assert count_in_flight(schedule) == ((3,) if kind == "gpipe" else (1,))


@pytest.mark.parametrize("kind", sorted(ACTION_WRITERS))
def test_fewer_microbatches_than_ranks_are_sound(kind: Any) -> None:
    for microbatches in range(1, 9):
        assert verify_schedule(build_schedule(kind, 8, microbatches)) == ()


def test_dualpipe_feeds_both_ends() -> None:
    schedule = build_schedule("dualpipe", 4, 8)
    first = [lane[0] for lane in schedule.actions]
    assert first[0] == PipelineAction("F", 0, 0)
    assert first[3] == PipelineAction("F", 0, 4)
    assert schedule.rank_of(0, 3) == 0
    assert schedule.rank_of(0, 4) == 3


def test_dualpipe_is_symmetric() -> None:
    schedule = build_schedule("dualpipe", 6, 16)
    for rank in range(3):
        mirrored = [a._replace(microbatch=(a.microbatch + 8) % 16) for a in schedule.actions[rank]]
        assert tuple(mirrored) == schedule.actions[5 - rank]


def test_dualpipe_takes_an_odd_number_of_microbatches() -> None:
    schedule = build_schedule("dualpipe", 4, 9)
    assert verify_schedule(schedule) == ()
    assert [schedule.rank_of(0, m) for m in (0, 4, 5, 8)] == [0, 0, 3, 3]


def test_a_gpipe_limit_runs_rounds() -> None:
    lane = build_schedule("gpipe", 2, 5, max_in_flight=2).actions[0]
    assert " ".join(f"{a.op}{a.microbatch}" for a in lane) == "F0 F1 B0 B1 F2 F3 B2 B3 F4 B4"


def test_1f1b_with_a_limit_of_one_runs_one_microbatch_at_a_time() -> None:
    lane = build_schedule("1f1b", 3, 3, max_in_flight=1).actions[0]
    assert " ".join(f"{a.op}{a.microbatch}" for a in lane) == "F0 B0 F1 B1 F2 B2"


@given(p=st.integers(2, 12), m=st.integers(1, 60))
def test_interleaved_groups_leave_no_short_remainder(p: int, m: int) -> None:
    group = get_default_group_size(p, m)
    assert min(p, m) <= group <= m
    assert m % group == 0 or m % group >= p
    if m % p == 0:
        assert group == p


@given(p=st.integers(2, 5), v=st.integers(2, 3), m=st.integers(1, 14), data=st.data())
def test_interleaved_takes_any_group_that_leaves_no_short_remainder(
    p: int, v: int, m: int, data: st.DataObject
) -> None:
    group = data.draw(st.integers(min(p, m), m))
    if 0 < m % group < p:
        assert "group" in refused("interleaved", p, m, virtual_stages=v, group=group)
    else:
        assert (
            verify_schedule(build_schedule("interleaved", p, m, virtual_stages=v, group=group))
            == ()
        )


def test_a_short_last_group_can_deadlock() -> None:
    # The reason for the rule: what would be written is not sound.
    assert "deadlock" in verify_schedule(unchecked(ScheduleParams(4, 5, 3, 4)))[0].what


def test_the_interleaved_limit_is_as_low_as_it_can_be() -> None:
    fix = refused("interleaved", 4, 8, virtual_stages=2, max_in_flight=4)
    assert fix == {"max_in_flight": "use 5 or more"}
    assert (
        verify_schedule(build_schedule("interleaved", 4, 8, virtual_stages=2, max_in_flight=5))
        == ()
    )
    assert "deadlock" in verify_schedule(unchecked(ScheduleParams(4, 8, 2, 4, 4)))[0].what


def test_a_limit_that_no_form_keeps_names_the_least() -> None:
    assert refused("zb-v", 8, 16, max_in_flight=7) == {"max_in_flight": "use 8 or more"}
    assert refused("dualpipe-v", 4, 16, max_in_flight=8) == {"max_in_flight": "use 9 or more"}
    assert max(count_in_flight(build_schedule("zb-v", 8, 16, max_in_flight=8))) == 8


def test_everything_wrong_is_listed_at_once() -> None:
    found = refused("1f1b", 0, -1, virtual_stages=0, max_in_flight=0, group=2.5)
    assert set(found) == {"ranks", "microbatches", "virtual_stages", "max_in_flight", "group"}


def test_an_unknown_kind_gets_the_nearest() -> None:
    assert refused("1f1", 4, 8)["kind"] == "did you mean 1f1b?"


def test_what_a_layout_cannot_be_is_refused_in_the_words_of_build() -> None:
    assert refused("dualpipe", 3, 8) == {"ranks": "use pp=4"}
    assert "virtual_stages" in refused("zb-v", 4, 8, virtual_stages=3)
    assert "kind" in refused("1f1b", 4, 8, virtual_stages=2)


def test_a_group_means_nothing_to_other_kinds() -> None:
    assert refused("1f1b", 4, 8, group=4) == {"group": "leave it out"}


def test_a_group_is_no_larger_than_the_step_and_no_smaller_than_the_pipeline() -> None:
    assert refused("interleaved", 4, 8, virtual_stages=2, group=3) == {"group": "use 4"}
    assert refused("interleaved", 4, 8, virtual_stages=2, group=9) == {"group": "use 4"}


def test_a_schedule_too_large_to_write_is_refused() -> None:
    assert "microbatches" in refused("1f1b", 1000, 10**6)


@given(schedules())
def test_schedules_survive_json(schedule: PipelineSchedule) -> None:
    full = add_transfers(schedule)
    assert msgspec.json.decode(msgspec.json.encode(full), type=PipelineSchedule) == full


@given(schedules())
def test_equal_chunks_peak_at_what_is_in_flight(schedule: PipelineSchedule) -> None:
    assert find_activation_peaks(schedule, [1.0] * schedule.chunks) == count_in_flight(schedule)


@given(schedules())
def test_transfers_hold_nothing(schedule: PipelineSchedule) -> None:
    full = add_transfers(schedule)
    assert count_in_flight(full) == count_in_flight(schedule)
    sizes = [1.0] * schedule.chunks
    assert find_activation_peaks(full, sizes) == find_activation_peaks(schedule, sizes)


def test_chunks_of_different_size_weigh_what_they_weigh() -> None:
    schedule = build_schedule("1f1b", 3, 6)
    assert find_activation_peaks(schedule, [10, 20, 30]) == (30, 40, 30)


def test_what_the_input_backward_frees_is_free_before_the_weights_run() -> None:
    schedule = build_schedule("zb-h1", 3, 6)
    assert find_activation_peaks(schedule, [1] * 3, kept_after_input=1.0) == (3, 3, 3)
    # Rank 2 holds one microbatch between F and I, and two that wait for W.
    assert find_activation_peaks(schedule, [1] * 3, kept_after_input=0.5) == (3, 2.5, 2)
    assert find_activation_peaks(schedule, [1] * 3, kept_after_input=0.0) == (3, 2, 1)
