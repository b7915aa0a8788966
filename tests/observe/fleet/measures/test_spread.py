"""Quantiles, means and shares."""

import numpy as np
import pytest

from meshwright.observe.fleet.measures.spread import curve, curve_of, share_by


def test_a_curve_of_samples_tells_their_quantiles_and_mean() -> None:
    samples = np.random.default_rng(0).gamma(2.0, 10.0, 50_000)
    found = curve_of(samples)
    assert found.mean() == pytest.approx(samples.mean(), rel=0.01)
    assert found.quantile(0.9) == pytest.approx(np.quantile(samples, 0.9), rel=0.01)
    assert found.between(0.5) == pytest.approx(np.median(samples), rel=0.001)
    assert found.at_most(20) == pytest.approx((samples <= 20).mean(), abs=0.002)


def test_samples_without_a_value_do_not_count() -> None:
    assert curve_of([0.0, np.nan, 10.0]).mean() == pytest.approx(5, rel=0.01)


def test_a_curve_read_off_a_figure_begins_with_its_lowest_value() -> None:
    found = curve([0, 1, 2, 2], [0.4, 0.399, 0.9, 1.0])
    assert found.quantile(0.1) == 0
    assert found.at_most(1) == 0.4
    assert found.at_most(-1) == 0
    assert found.mean() == pytest.approx(0.6 * 2)


def test_shares_are_of_rows_or_of_weight() -> None:
    assert share_by(["a", "b", "b", "b"]) == {"b": 0.75, "a": 0.25}
    assert share_by(["a", "b"], [9, 1]) == {"a": 0.9, "b": 0.1}
