"""Statistical detectors keep their false-alarm rates, and see what is there."""

import numpy as np
import pytest

from meshwright.observe.findings.stepping import change, outliers
from tests.observe.findings.measuring import false_alarms

MOST_FALSE = 0.015


def test_clean_step_times_raise_few_alarms() -> None:
    for kind, steps, far, changed in false_alarms(runs=300):
        if kind.startswith("auto"):
            continue  # Pettitt's test takes steps to be independent; the docs say how it errs.
        assert far <= MOST_FALSE, (kind, steps)
        assert changed <= MOST_FALSE, (kind, steps)


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
