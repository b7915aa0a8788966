"""Levels: what is held at each moment."""

import numpy as np
import pytest

from meshwright.fleet.statistics.step_function import (
    StepFunction,
    build_step_function,
    count_concurrent,
    measure_pending_while_idle,
)


def test_what_is_held_adds_up() -> None:
    level = count_concurrent([0, 5], [10, 20], [4, 2])
    assert level.time_s.tolist() == [0, 5, 10]
    assert level.value.tolist() == [4, 6, 2]
    assert level.end_s == 20
    assert level.mean() == (4 * 5 + 6 * 5 + 2 * 10) / 20


def test_what_has_no_end_or_no_length_is_not_held() -> None:
    assert len(count_concurrent([0, 3], [np.nan, 3], 1).time_s) == 0
    assert np.isnan(count_concurrent([], [], 1).mean())


def test_parts_of_gpus_return_to_nought() -> None:
    level = count_concurrent([0, 0, 0, 5], [1, 2, 3, 6], [0.1, 0.2, 0.3, 1])
    assert level.evaluate([4])[0] == 0


def test_nothing_is_known_outside_a_level() -> None:
    level = StepFunction(np.array([10.0]), np.array([3.0]), 20)
    assert level.evaluate([9, 10, 19, 20]).tolist() == [0, 3, 3, 0]


def test_the_last_sample_holds_as_long_as_others() -> None:
    level = build_step_function([0, 60, 120], [1, 0, 1])
    assert level.end_s == 180
    assert level.mean() == pytest.approx(2 / 3)


def test_waiting_counts_only_while_something_is_idle() -> None:
    idle = build_step_function([0, 60, 120, 180], [5, 0, 5, 5])
    pending = build_step_function([0, 60, 120, 180], [8, 8, 0, 8])
    assert measure_pending_while_idle(pending, idle) == 0.5
    of_jobs = count_concurrent([0], [120], [8])
    assert measure_pending_while_idle(of_jobs, idle) == 0.5
    assert np.isnan(measure_pending_while_idle(count_concurrent([], [], 1), idle))
