"""Statistics that a few odd values do not move."""

import numpy as np
import pytest

from meshwright.fleet.columns import group_codes, read_text
from meshwright.fleet.patterns.data.change_point import find_change_point
from meshwright.fleet.patterns.data.group_math import mean_where, slice_max, slice_sums
from meshwright.fleet.statistics.robust import (
    control_false_discovery,
    find_count_outliers,
    group_medians,
    poisson_tail,
    robust_z_scores,
)


def test_medians_of_groups_are_those_of_numpy() -> None:
    rng = np.random.default_rng(1)
    values, groups = rng.normal(size=500), rng.integers(0, 7, 500)
    values[::50] = np.nan
    found = group_medians(values, groups, 8)
    for group in range(7):
        assert found[group] == pytest.approx(np.nanmedian(values[groups == group]))
    assert np.isnan(found[7])


def test_one_odd_value_stands_out_and_moves_no_other() -> None:
    values = np.array([1.0, 1.01, 0.99, 1.0, 0.7])
    scores = robust_z_scores(values, np.zeros(5, dtype=np.int64), 0.01)
    assert scores[4] < -15
    assert np.abs(scores[:4]).max() < 2


def test_equal_values_are_not_odd() -> None:
    assert robust_z_scores(np.ones(4), np.zeros(4, dtype=np.int64), 0.01).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("seen", "mean"), [(1, 0.5), (3, 0.1), (40, 20.0), (2, 30.0)])
def test_poisson_tails_are_those_of_the_series(seen: int, mean: float) -> None:
    from math import exp, factorial

    below = sum(exp(-mean) * mean**at / factorial(at) for at in range(seen))
    found = poisson_tail(np.array([float(seen)]), np.array([mean]))[0]
    assert found == pytest.approx(1 - below, rel=1e-6)


def test_false_discoveries_are_as_few_as_asked_for() -> None:
    rng = np.random.default_rng(2)
    parts = []
    for _ in range(500):
        found = control_false_discovery(
            np.concatenate([rng.random(95), rng.random(5) * 1e-6]), 0.05
        )
        assert found[95:].all()
        parts.append(found[:95].sum() / found.sum())
    assert np.mean(parts) < 0.06


def test_sums_and_means_of_slices() -> None:
    values = np.array([1.0, np.nan, 3.0, 4.0])
    low, high = np.array([0, 1, 2, 4]), np.array([3, 2, 4, 4])
    assert slice_sums(np.array([1.0, 2, 3, 4]), low, high).tolist() == [6, 2, 7, 0]
    assert np.array_equal(mean_where(values, None, low, high), [2, np.nan, 3.5, np.nan], True)
    assert np.array_equal(slice_max(values, low, high), [3, np.nan, 4, np.nan], True)


def test_groups_by_two_columns_leave_out_what_is_missing() -> None:
    found = group_codes(np.array([0, 0, 1, -1]), np.array([5, 5, 5, 5]))
    assert found[0] == found[1] != found[2]
    assert found[3] == -1


def test_text_of_an_empty_or_missing_column() -> None:
    import pyarrow as pa

    assert read_text(pa.table({"a": pa.array([], pa.string())}), "a").codes.size == 0
    assert read_text(pa.table({"a": ["x", None]}), "a").at(1) == ""
    assert read_text(pa.table({"a": ["x"]}), "b").codes.tolist() == [-1]


def _change(values: np.ndarray) -> dict[str, np.ndarray]:
    size = np.array([values.size])
    owner = np.zeros(values.size, dtype=np.int64)
    time = 300.0 * np.arange(values.size, dtype=np.float64)
    return find_change_point(values, time, owner, low=np.array([0]), high=size, step=300.0)


def test_a_step_is_found_where_it_is() -> None:
    rng = np.random.default_rng(3)
    level = np.where(np.arange(200) < 120, 0.4, 0.3) + rng.normal(0, 0.01, 200)
    found = _change(level)
    assert found["changed_s"][0] == pytest.approx(120 * 300, abs=600)
    assert found["after"][0] / found["before"][0] == pytest.approx(0.75, abs=0.02)
    assert found["change_score"][0] > 6


def test_noise_alone_is_seldom_a_change() -> None:
    rng = np.random.default_rng(4)
    scores = [_change(0.4 + rng.normal(0, 0.02, 200))["change_score"][0] for _ in range(300)]
    # Of Brownian bridges one in ten thousand comes farther than 2.2.
    assert max(scores) < 2.5


def test_counts_far_above_those_of_others_are_outliers() -> None:
    counts = np.array([1.0, 2.0, 1.0, 40.0])
    found = find_count_outliers(counts, population=100)
    assert found.is_outlier.tolist() == [False, False, False, True]
    assert found.usual == pytest.approx(0.01)


def test_counts_below_the_least_are_no_outliers() -> None:
    assert not find_count_outliers(np.array([3.0]), population=10_000).is_outlier.any()
    assert find_count_outliers(np.array([3.0]), population=10_000, least=3).is_outlier.all()


def test_counts_that_vary_as_much_among_all_are_no_outliers() -> None:
    counts = np.random.default_rng(5).negative_binomial(2, 0.05, 200).astype(np.float64)
    assert find_count_outliers(counts, population=200).is_outlier.sum() <= 1
