"""Sums of what exceeds the usual: their limits follow from the rate of false alarms."""

import math

import numpy as np
import pytest

from meshwright.observe.statistics.cusum import (
    MIN_RISE,
    NUM_NEWEST,
    BaselineStats,
    CusumDetector,
    compute_cusum_limit,
    estimate_baseline,
)


def crossings(slack: float, top: float, count: int) -> float:
    """Return how many values pass between two alarms of one plain sum, on normal noise."""
    random, found, held = np.random.default_rng(2), 0, 0.0
    for value in random.standard_normal(count).tolist():
        held = max(0.0, held + value - slack)
        if held > top:
            found, held = found + 1, 0.0
    return count / max(1, found)


@pytest.mark.parametrize("slack", [0.25, 0.5, 1.0])
def test_a_limit_gives_the_rate_that_was_asked_for(slack: float) -> None:
    top = compute_cusum_limit(slack, 1.0, quiet=500.0)
    assert crossings(slack, top, 200_000) == pytest.approx(500.0, rel=0.1)


def test_limits_grow_with_noise_and_with_quiet() -> None:
    assert compute_cusum_limit(0.01, 0.02) < compute_cusum_limit(0.01, 0.04)
    assert compute_cusum_limit(0.01, 0.02, 1e3) < compute_cusum_limit(0.01, 0.02, 1e6)
    assert compute_cusum_limit(1.0, 1e-4) < 1e-3  # what noise cannot reach needs no limit


def test_values_that_remember_have_wider_sums() -> None:
    random = np.random.default_rng(2)
    alone = 0.02 * random.standard_normal(600)
    linked = np.empty(600)
    held = 0.0
    for at, value in enumerate(alone):
        held = linked[at] = 0.8 * held + 0.6 * value
    assert estimate_baseline(alone).increment_std == pytest.approx(0.02, rel=0.35)
    assert estimate_baseline(linked).increment_std == pytest.approx(
        0.06, rel=0.45
    )  # 0.02 √(1.8 / 0.2)


def test_outliers_do_not_move_what_is_usual() -> None:
    values = np.zeros(100)
    values[::10] = 2.0
    found = estimate_baseline(values)
    assert found.level == 0
    assert 0 < found.mean_offset < MIN_RISE


def test_a_move_is_dated_and_has_a_direction() -> None:
    usual = BaselineStats(
        level=0.0, mean_offset=0.0, clip=2 * MIN_RISE, increment_std=0.005, num_values=500
    )
    sums = CusumDetector(usual)
    assert all(sums.add(0.0) is None for _ in range(20))
    found = [sums.add(math.log(1.05)) for _ in range(NUM_NEWEST)]
    first = next(one for one in found if one is not None)
    assert (first.is_up, first.num_values_ago) == (True, found.index(first) + 1)
    down = CusumDetector(usual)
    moves = [down.add(-0.1) for _ in range(NUM_NEWEST)]
    assert moves[-1] is not None
    assert not moves[-1].is_up


def test_less_than_the_least_rise_is_not_told() -> None:
    sums = CusumDetector(
        BaselineStats(
            level=0.0, mean_offset=0.0, clip=2 * MIN_RISE, increment_std=0.001, num_values=500
        )
    )
    assert all(sums.add(math.log1p(0.9 * MIN_RISE)) is None for _ in range(500))
