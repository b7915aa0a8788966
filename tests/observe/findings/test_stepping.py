"""Statistical detectors keep their false-alarm rates, and see what is there."""

import numpy as np
import pytest

from meshwright.observe.findings.stepping import change, outliers
from validation.findings.alarms import step_alarms

MOST_FALSE = 0.015
MOST_FALSE_HEAVY = 0.04
"""A heavy tail holds steps that are far longer indeed."""


def test_clean_step_times_raise_few_alarms() -> None:
    for one in step_alarms(runs=200, numbers=(8, 16, 50)):
        assert one.outliers <= (MOST_FALSE_HEAVY if "heavy" in one.noise else MOST_FALSE), one
        # Pettitt's test takes steps to be independent; the docs say how it errs where they are not.
        assert one.changes <= MOST_FALSE or one.noise.startswith("autocorrelated"), one


@pytest.mark.parametrize("rise", [1.05, 1.2])
def test_a_lasting_rise_is_dated(rise: float) -> None:
    random = np.random.default_rng(0)
    times = random.normal(1.0, 0.01, 40)
    times[25:] *= rise
    found = change(times)
    assert found is not None
    place, chance = found
    assert abs(place - 25) <= 1
    assert chance < 0.005


def test_single_long_steps_are_outliers_and_half_of_them_are_not() -> None:
    times = np.random.default_rng(1).normal(1.0, 0.01, 20)
    times[[4, 17]] = 1.5
    assert outliers(times).tolist() == [4, 17]
    times[:9] = 1.5
    assert outliers(times).tolist() == []


def test_few_steps_say_nothing() -> None:
    assert outliers(np.array([1.0, 1.0, 9.0])).size == 0
    assert change(np.array([1.0, 1.0, 9.0])) is None
    assert change(np.array([1.0])) is None
