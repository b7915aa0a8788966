"""Statistical detectors keep their false-alarm rates, and see what is there."""

import numpy as np
import pytest

from meshwright.observe.findings import RankContext
from meshwright.observe.findings.job.step_variation import measure_step_times
from meshwright.observe.statistics.change_points import find_change_point, find_outliers
from tests.observe.analyze.traces import call, kernel, step, timeline
from validation.findings.alarms import NOISES, has_outliers, step_alarms

MOST_FALSE = 0.015
MOST_FALSE_HEAVY = 0.04
"""A heavy tail holds steps that are far longer indeed."""


def test_clean_step_times_raise_few_alarms() -> None:
    for one in step_alarms(runs=200, numbers=(8, 16, 50)):
        assert one.outliers <= (MOST_FALSE_HEAVY if "heavy" in one.noise else MOST_FALSE), one
        # Pettitt's test takes steps to be independent; the docs say how it errs where they are not.
        assert one.changes <= MOST_FALSE or one.noise.startswith("autocorrelated"), one


def test_outliers_of_few_clean_steps_are_as_rare_as_the_docs_say() -> None:
    random = np.random.default_rng()
    for noise, most in (("log-normal, 20 %", 0.01), ("heavy tail (t, 3), 2 %", 0.02)):
        told = [has_outliers(1e8 * NOISES[noise](random, 8)) for _ in range(2000)]
        assert np.mean(told) < most, noise


def test_a_host_that_runs_ahead_makes_no_step_longer() -> None:
    # Nine steps are launched at once, the tenth waits for all of them; each takes the device 100.
    rows, moment = [], 0
    for number in range(21):
        length = 900 if number % 10 == 9 else 10
        rows.append(step(number, moment, moment + length))
        rows.append(call(moment + 1, moment + 2, flow_out=number))
        rows.append(kernel(5 + 100 * number, 105 + 100 * number, flow_in=number))
        moment += length
    steps, times = measure_step_times(RankContext(timeline(*rows)))
    assert [one.number for one in steps] == list(range(20))
    assert times.tolist() == [100.0] * 20


@pytest.mark.parametrize("rise", [1.05, 1.2])
def test_a_lasting_rise_is_dated(rise: float) -> None:
    random = np.random.default_rng(0)
    times = random.normal(1.0, 0.01, 40)
    times[25:] *= rise
    found = find_change_point(times)
    assert found is not None
    place, chance = found
    assert abs(place - 25) <= 1
    assert chance < 0.005


def test_single_long_steps_are_outliers_and_half_of_them_are_not() -> None:
    times = np.random.default_rng(1).normal(1.0, 0.01, 20)
    times[[4, 17]] = 1.5
    assert find_outliers(times).tolist() == [4, 17]
    times[:9] = 1.5
    assert find_outliers(times).tolist() == []


def test_few_steps_say_nothing() -> None:
    assert find_outliers(np.array([1.0, 1.0, 9.0])).size == 0
    assert find_change_point(np.array([1.0, 1.0, 9.0])) is None
    assert find_change_point(np.array([1.0])) is None
