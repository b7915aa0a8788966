"""Levels: what is held at each moment."""

import numpy as np
import pytest

from meshwright.observe.fleet.measures.levels import Level, held, pending_while_idle, sampled


def test_what_is_held_adds_up() -> None:
    level = held([0, 5], [10, 20], [4, 2])
    assert level.time_s.tolist() == [0, 5, 10]
    assert level.value.tolist() == [4, 6, 2]
    assert level.end_s == 20
    assert level.mean() == (4 * 5 + 6 * 5 + 2 * 10) / 20


def test_what_has_no_end_or_no_length_is_not_held() -> None:
    assert len(held([0, 3], [np.nan, 3], 1).time_s) == 0
    assert np.isnan(held([], [], 1).mean())


def test_parts_of_gpus_return_to_nought() -> None:
    level = held([0, 0, 0, 5], [1, 2, 3, 6], [0.1, 0.2, 0.3, 1])
    assert level.at([4])[0] == 0


def test_nothing_is_known_outside_a_level() -> None:
    level = Level(np.array([10.0]), np.array([3.0]), 20)
    assert level.at([9, 10, 19, 20]).tolist() == [0, 3, 3, 0]


def test_the_last_sample_holds_as_long_as_others() -> None:
    level = sampled([0, 60, 120], [1, 0, 1])
    assert level.end_s == 180
    assert level.mean() == pytest.approx(2 / 3)


def test_waiting_counts_only_while_something_is_idle() -> None:
    idle = sampled([0, 60, 120, 180], [5, 0, 5, 5])
    pending = sampled([0, 60, 120, 180], [8, 8, 0, 8])
    assert pending_while_idle(pending, idle) == 0.5
    of_jobs = held([0], [120], [8])
    assert pending_while_idle(of_jobs, idle) == 0.5
    assert np.isnan(pending_while_idle(held([], [], 1), idle))
