"""Failures in closed form, against figures that were published."""

import math

import pytest

from meshwright.observe.fleet.measures.failures import (
    checkpoint_interval_s,
    expected_ettr,
    failures_per_node_day,
    mttf_s,
)


def test_more_nodes_fail_sooner() -> None:
    assert mttf_s(2048, 6.5e-3) / 3600 == pytest.approx(1.8, rel=0.01)
    assert mttf_s(0, 6.5e-3) == math.inf


def test_a_rate_is_what_was_counted_over_what_was_exposed() -> None:
    assert failures_per_node_day(419, 2048, 54) == pytest.approx(3.79e-3, rel=0.001)
    assert math.isnan(failures_per_node_day(1, 0, 1))


def test_ettr_is_whole_without_failures_and_nought_with_too_many() -> None:
    assert expected_ettr(math.inf, 300, 3600, 0) == 1
    assert expected_ettr(math.inf, 300, 3600, 36) == pytest.approx(1 / 1.01)
    assert expected_ettr(100, 300, 3600, 0) == 0


def test_no_other_interval_keeps_more() -> None:
    mttf, write, restart = 40_000.0, 60.0, 300.0
    best = checkpoint_interval_s(mttf, write)
    kept = expected_ettr(mttf, restart, best, write)
    assert kept >= expected_ettr(mttf, restart, best * 1.3, write)
    assert kept >= expected_ettr(mttf, restart, best / 1.3, write)
    assert checkpoint_interval_s(1.0, 60.0) == 0
