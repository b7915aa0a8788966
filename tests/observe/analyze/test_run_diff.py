"""Runs of different lengths and sizes compare by what a step of a rank takes."""

import pytest

from meshwright.observe.analyze.run_diff import diff_profiles
from meshwright.observe.analyze.step_profile import build_step_profile
from tests.observe.analyze.jobs import collective, steady_job, timeline_of


@pytest.mark.parametrize(("steps", "ranks"), [(3, 4), (20, 4), (8, 2), (20, 2)])
def test_the_same_work_costs_the_same_however_long_and_wide_it_was_recorded(
    steps: int, ranks: int
) -> None:
    found = diff_profiles(
        build_step_profile([steady_job(steps=8, ranks=4)]),
        build_step_profile([steady_job(steps=steps, ranks=ranks)]),
    )
    assert found.cost_ns == 0
    assert (found.regressions, found.improvements) == ((), ())


def test_a_slower_kernel_costs_what_it_takes_longer_per_step() -> None:
    slow = build_step_profile([steady_job(steps=5, compute_us=lambda _rank, _step: 950.0)])
    found = diff_profiles(build_step_profile([steady_job(steps=20)]), slow)
    assert found.cost_ns == pytest.approx(50_000)
    assert [change.name for change in found.regressions] == ["gemm"]


def test_other_ranks_are_said_with_those_that_compare() -> None:
    notes = diff_profiles(
        build_step_profile([steady_job(ranks=4)]), build_step_profile([steady_job(ranks=2)])
    ).notes
    assert any("4 ranks are compared with 2" in note and "--ranks 0,1" in note for note in notes)


def test_a_run_without_steps_is_said_to_hold_only_as_one() -> None:
    bare = build_step_profile([timeline_of([collective(rank, 0, 10) for rank in range(4)])], "bare")
    notes = diff_profiles(build_step_profile([steady_job()], "marked"), bare).notes
    assert any(
        "no steps are marked in bare" in note and "only if it is one" in note for note in notes
    )
