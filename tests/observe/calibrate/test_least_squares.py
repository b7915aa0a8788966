"""Least squares on logarithms: nearest constants, inside their bounds, in spite of outliers."""

from typing import Any

import numpy as np
import pytest

from meshwright.observe.calibrate.least_squares import fit_log_constants

X = np.linspace(1.0, 100.0, 40)


def line(values: Any) -> Any:
    return values[0] + values[1] * X


def test_constants_of_different_sizes_come_back() -> None:
    found, loss = fit_log_constants(
        line, line(np.array([3e-6, 2e-3])), [(1e-6, 1e-9, 1.0), (1, 1e-9, 9)]
    )
    assert found == pytest.approx([3e-6, 2e-3], rel=1e-2)
    assert loss < 1e-6


def test_bounds_hold() -> None:
    found, _ = fit_log_constants(
        line, line(np.array([5.0, 2.0])), [(0.5, 0.1, 1.0), (1.0, 0.1, 10.0)]
    )
    assert found[0] == pytest.approx(1.0)
    assert 2.0 < found[1] < 2.3


def test_outliers_count_less() -> None:
    times = line(np.array([1.0, 2.0]))
    times[::10] *= 5.0
    found, _ = fit_log_constants(line, times, [(0.5, 0.01, 10.0), (1.0, 0.01, 10.0)])
    assert found[1] == pytest.approx(2.0, rel=0.05)


def test_a_row_without_weight_does_not_count() -> None:
    times = line(np.array([1.0, 2.0]))
    weights = np.ones(40)
    times[20:], weights[20:] = 1e3, 0.0
    found, _ = fit_log_constants(line, times, [(0.5, 0.01, 10.0), (1.0, 0.01, 10.0)], weights)
    assert found == pytest.approx([1.0, 2.0], rel=1e-2)
