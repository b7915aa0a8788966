"""Quantiles, means and shares."""

import numpy as np
import pytest

from meshwright.fleet.statistics.distribution import estimate_cdf, make_cdf, share_by_group


def test_a_curve_of_samples_tells_their_quantiles_and_mean() -> None:
    samples = np.random.default_rng(0).gamma(2.0, 10.0, 50_000)
    found = estimate_cdf(samples)
    assert found.mean() == pytest.approx(samples.mean(), rel=0.01)
    assert found.quantile(0.9) == pytest.approx(np.quantile(samples, 0.9), rel=0.01)
    assert found.interpolate_quantile(0.5) == pytest.approx(np.median(samples), rel=0.001)
    assert found.cdf(20) == pytest.approx((samples <= 20).mean(), abs=0.002)


def test_samples_without_a_value_do_not_count() -> None:
    assert estimate_cdf([0.0, np.nan, 10.0]).mean() == pytest.approx(5, rel=0.01)


def test_a_curve_read_off_a_figure_begins_with_its_lowest_value() -> None:
    found = make_cdf([0, 1, 2, 2], [0.4, 0.399, 0.9, 1.0])
    assert found.quantile(0.1) == 0
    assert found.cdf(1) == 0.4
    assert found.cdf(-1) == 0
    assert found.mean() == pytest.approx(0.6 * 2)


def test_shares_are_of_rows_or_of_weight() -> None:
    assert share_by_group(["a", "b", "b", "b"]) == {"b": 0.75, "a": 0.25}
    assert share_by_group(["a", "b"], [9, 1]) == {"a": 0.9, "b": 0.1}
