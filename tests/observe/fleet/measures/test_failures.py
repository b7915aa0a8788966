"""Failures in closed form, against figures that were published."""

import math

import pytest

from meshwright.observe.fleet.measures.failures import failures_per_node_day, mttf_s


def test_more_nodes_fail_sooner() -> None:
    assert mttf_s(2048, 6.5e-3) / 3600 == pytest.approx(1.8, rel=0.01)
    assert mttf_s(0, 6.5e-3) == math.inf


def test_a_rate_is_what_was_counted_over_what_was_exposed() -> None:
    assert failures_per_node_day(419, 2048, 54) == pytest.approx(3.79e-3, rel=0.001)
    assert math.isnan(failures_per_node_day(1, 0, 1))
