"""Faults planted in simulated fleets are found, and the page shows the last measurement."""

import pytest

from meshwright.fleet.patterns import find_cases, list_patterns
from validation.fleet_patterns.page import PAGE, renewed
from validation.fleet_patterns.planting import JOB_FAULTS
from validation.fleet_patterns.run import FIRST_SEED, read_result
from validation.fleet_patterns.trials import fleet_in, judge, planted, together

LEAST_PRECISION = 0.9
LEAST_RECALL = 0.85


def test_there_is_a_fault_for_every_pattern() -> None:
    assert {one.name for one in list_patterns()} == set(JOB_FAULTS)


def test_the_page_is_as_the_patterns_and_the_last_result_make_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renewed(text, read_result()) == text


def test_the_last_measurement_is_of_this_list_of_patterns_and_good() -> None:
    result = read_result()
    assert [row.name for row in result.rows] == [one.name for one in list_patterns()]
    true, false, missed = (
        sum(getattr(row, name) for row in result.rows) for name in ("true", "false", "missed")
    )
    assert true >= LEAST_PRECISION * (true + false)
    assert true >= LEAST_RECALL * (true + missed)
    # One false alarm in a few hundred sound jobs is what an operator bears.
    assert sum(row.sound_false for row in result.rows) <= result.sound_jobs / 200


@pytest.mark.slow
def test_faults_are_found_among_sound_jobs() -> None:
    trials = []
    for seed in (1, 2):
        world = planted(seed)
        trials.append(judge(world, fleet_in(world.tables())))
    found = together(trials).values()
    true, false = sum(one.true for one in found), sum(one.false for one in found)
    missed = sum(one.missed for one in found)
    assert true >= LEAST_PRECISION * (true + false), [trial.wrong for trial in trials]
    assert true >= LEAST_RECALL * (true + missed), [trial.wrong for trial in trials]


def test_seeds_of_the_score_are_not_those_of_development() -> None:
    assert FIRST_SEED > 100


@pytest.mark.slow
def test_no_hour_of_a_job_is_told_twice() -> None:
    fleet = fleet_in(planted(3).tables())
    claimed: dict[int, float] = {}
    for case in find_cases(fleet):
        own = case.pattern.owner == "user" and case.pattern.family != "requests"
        if own and case.attributed_hours is not None and case.detection.jobs.size == 1:
            row = int(case.detection.jobs[0])
            claimed[row] = claimed.get(row, 0.0) + case.attributed_hours
    assert claimed
    for row, hours in claimed.items():
        assert hours <= fleet.jobs.gpu_hours[row] * (1 + 1e-9)
