"""Tuned orders are sound, keep their limit, and are never longer than what they started from."""

from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.pipeline import (
    PipelinePassDurations,
    PipelineSchedule,
    add_transfers,
    build_schedule,
    compute_action_times,
    count_in_flight,
    find_zero_bubble_schedule,
    tune_schedule,
    verify_schedule,
)
from meshwright.policy.pipeline.action_times import UNIT_DURATIONS
from meshwright.policy.pipeline.schedule_tuner import compute_makespan
from tests.policy.pipeline.reference import execute, schedules

LENGTHS = st.builds(
    PipelinePassDurations,
    forward=st.integers(1, 20),
    backward_input=st.integers(1, 20),
    backward_weight=st.integers(0, 20),
    transfer=st.integers(0, 5),
)


@given(schedules(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_actions_fall_where_the_obvious_run_puts_them(
    schedule: PipelineSchedule, f: int, i: int, w: int
) -> None:
    lengths = PipelinePassDurations(forward=f, backward_input=i, backward_weight=w)
    run = execute(schedule, f, i, w)
    for one in compute_action_times(schedule, lengths):
        for action in one.group:
            key = ("I" if action.op == "B" else action.op, action.chunk, action.microbatch)
            assert (one.start, one.end) == (run.start[key], run.end[key])


def test_a_transfer_delays_the_other_rank_only() -> None:
    placed = compute_action_times(build_schedule("zb-v", 2, 1), PipelinePassDurations(transfer=10))
    starts = {(one.group[0].op, one.group[0].chunk): one.start for one in placed}
    assert starts["F", 1] == 11
    assert starts["F", 2] == 12  # the same rank
    assert starts["F", 3] == 23


def test_ranks_that_wait_for_ever_cannot_be_placed() -> None:
    sound = build_schedule("1f1b", 2, 1)
    stuck = msgspec.structs.replace(sound, actions=(sound.actions[0], sound.actions[1][::-1]))
    with pytest.raises(InputError, match="rank 0 waits for ever"):
        compute_action_times(stuck)


def test_an_overlapped_pair_takes_its_own_length() -> None:
    placed = compute_action_times(
        build_schedule("dualpipe", 4, 8), PipelinePassDurations(overlapped=2.5)
    )
    assert {one.end - one.start for one in placed if len(one.group) == 2} == {2.5}


@settings(max_examples=40)
@given(schedules(most_ranks=4, most_microbatches=10), LENGTHS, st.integers(0, 4))
def test_tuning_is_sound_within_its_limit_and_never_longer(
    schedule: PipelineSchedule, lengths: PipelinePassDurations, more: int
) -> None:
    if schedule.kind.startswith("dualpipe") and schedule.ranks > 1:
        return
    limit = max(count_in_flight(schedule)) + more
    tuned = tune_schedule(schedule, lengths, limit)
    assert verify_schedule(tuned, max_in_flight=limit) == ()
    assert compute_makespan(tuned, lengths) <= compute_makespan(schedule, lengths)


@settings(max_examples=40)
@given(
    p=st.integers(1, 6),
    m=st.integers(1, 16),
    lengths=LENGTHS,
    limit=st.integers(1, 12),
)
def test_a_straight_zero_bubble_order_fits_any_limit(
    p: int, m: int, lengths: PipelinePassDurations, limit: int
) -> None:
    schedule = find_zero_bubble_schedule(p, m, lengths, max_in_flight=limit)
    assert verify_schedule(schedule, max_in_flight=limit) == ()


@settings(max_examples=30)
@given(p=st.integers(2, 5), m=st.integers(1, 12), lengths=LENGTHS)
def test_zero_bubble_beats_or_equals_the_handmade_schedules(
    p: int, m: int, lengths: PipelinePassDurations
) -> None:
    straight = compute_makespan(find_zero_bubble_schedule(p, m, lengths), lengths)
    assert straight <= compute_makespan(build_schedule("zb-h1", p, m), lengths)
    assert straight <= compute_makespan(build_schedule("zb-h2", p, m), lengths)
    folded = compute_makespan(find_zero_bubble_schedule(p, m, lengths, shape="folded"), lengths)
    assert folded <= compute_makespan(build_schedule("zb-v", p, m), lengths)


def test_unequal_passes_gain_from_more_memory() -> None:
    # Forward 10, backward-input 11, backward-weight 8, one for each hop; 8 ranks, 24 microbatches.
    lengths = PipelinePassDurations(forward=10, backward_input=11, backward_weight=8, transfer=1)
    idle = [
        compute_makespan(find_zero_bubble_schedule(8, 24, lengths, max_in_flight=limit), lengths)[1]
        - 24 * 29
        for limit in (8, 12, 15, 24)
    ]
    assert idle == sorted(idle, reverse=True)
    assert idle[0] > 0
    assert idle[-1] == 0


@pytest.mark.parametrize("p", [4, 6, 8])
@pytest.mark.parametrize("m", [16, 23])
def test_v_half_idles_half_of_1f1b_and_v_min_two_thirds(p: int, m: int) -> None:
    # Qi et al. 2024, arXiv 2405.15362, table 1, in slots of half a rank: 1F1B idles 6(p - 1).
    half = build_schedule("zb-v", p, m, max_in_flight=p + 2)
    least = build_schedule("zb-v", p, m, max_in_flight=2 * ((p + 4) // 3))
    assert compute_makespan(half, UNIT_DURATIONS)[1] - 6 * m == 3 * (p - 1)
    assert compute_makespan(least, UNIT_DURATIONS)[1] - 6 * m <= 4 * (p - 1) + 2


def refused(schedule: PipelineSchedule, limit: int | None = None) -> str:
    with pytest.raises(InputError) as caught:
        tune_schedule(schedule, PipelinePassDurations(), limit)
    (problem,) = caught.value.problems
    return problem.where


def test_tuning_refuses_a_limit_below_what_the_schedule_holds() -> None:
    assert refused(build_schedule("1f1b", 4, 8), 3) == "max_in_flight"


def test_tuning_refuses_to_tear_overlapped_pairs_apart() -> None:
    assert refused(build_schedule("dualpipe", 4, 8)) == "schedule"


def test_tuning_refuses_written_transfers() -> None:
    assert refused(add_transfers(build_schedule("1f1b", 4, 8))) == "schedule"


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_length_is_a_number_from_zero(bad: float) -> None:
    with pytest.raises(InputError, match=r"lengths\.forward"):
        PipelinePassDurations(forward=bad)


@pytest.mark.parametrize("shape", ["straight", "folded"])
def test_zero_bubble_refuses_what_cannot_be_built(shape: Literal["straight", "folded"]) -> None:
    with pytest.raises(InputError, match="microbatches"):
        find_zero_bubble_schedule(4, 0, PipelinePassDurations(), shape=shape)
    with pytest.raises(InputError, match="max_in_flight"):
        find_zero_bubble_schedule(4, 8, PipelinePassDurations(), shape=shape, max_in_flight=0)
