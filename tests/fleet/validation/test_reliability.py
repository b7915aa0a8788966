"""Failures in closed form, against figures that were published."""

import math

import pytest

from meshwright.fleet.validation.reliability import compute_mttf_s, compute_node_failure_rate


def test_more_nodes_fail_sooner() -> None:
    assert compute_mttf_s(2048, 6.5e-3) / 3600 == pytest.approx(1.8, rel=0.01)
    assert compute_mttf_s(0, 6.5e-3) == math.inf


def test_a_rate_is_what_was_counted_over_what_was_exposed() -> None:
    assert compute_node_failure_rate(419, 2048, 54) == pytest.approx(3.79e-3, rel=0.001)
    assert math.isnan(compute_node_failure_rate(1, 0, 1))
