import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.workload import (
    EmpiricalLength,
    FixedLength,
    Lengths,
    LogNormalLength,
    UniformLength,
    fit_empirical_length,
)

fixed = st.builds(FixedLength, tokens=st.integers(1, 10**6))
uniform = st.tuples(st.integers(1, 3000), st.integers(1, 3000)).map(
    lambda pair: UniformLength(low=min(pair), high=max(pair))
)
log_normal = st.builds(
    LogNormalLength,
    median=st.floats(20, 5000),
    sigma=st.floats(0, 1.5),
    longest=st.integers(100, 20_000),
)
empirical = st.dictionaries(st.integers(0, 10**5), st.floats(0.01, 100), min_size=1).map(
    lambda weights: EmpiricalLength(
        values=tuple(sorted(weights)), weights=tuple(weights[key] for key in sorted(weights))
    )
)
any_lengths = st.one_of(fixed, uniform, log_normal, empirical)
shares = st.floats(0, 1)


@given(any_lengths, shares, shares)
def test_quantiles_never_fall(lengths: Lengths, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert lengths.quantile(low) <= lengths.quantile(high)


@given(any_lengths)
def test_the_mean_of_many_samples_is_near_the_mean(lengths: Lengths) -> None:
    count = 4000
    samples = lengths.sample(Random(1), count)
    spread = math.sqrt(max(0.0, lengths.second_moment() - lengths.mean() ** 2))
    # Six standard errors; half a token more for the rounding to whole tokens.
    assert abs(sum(samples) / count - lengths.mean()) <= 6 * spread / math.sqrt(count) + 0.5


@given(any_lengths)
def test_samples_lie_between_the_extreme_quantiles(lengths: Lengths) -> None:
    samples = lengths.sample(Random(3), 200)
    assert lengths.quantile(0) <= min(samples) <= max(samples) <= lengths.quantile(1)


@given(any_lengths, st.integers(0, 2**64))
def test_the_same_seed_draws_the_same_samples(lengths: Lengths, seed: int) -> None:
    assert lengths.sample(Random(seed), 50) == lengths.sample(Random(seed), 50)


@given(any_lengths)
def test_drawing_in_parts_draws_the_same_samples(lengths: Lengths) -> None:
    parts = Random(5)
    drawn = lengths.sample(parts, 7) + lengths.sample(parts, 13)
    assert drawn == lengths.sample(Random(5), 20)


@given(any_lengths, st.integers(0, 3), st.integers(1, 20_000))
def test_partial_moments_rise_to_the_whole(lengths: Lengths, order: int, limit: int) -> None:
    part, whole = lengths.raw_moment(order, limit), lengths.raw_moment(order)
    assert 0 <= part <= whole * (1 + 1e-9)
    assert lengths.raw_moment(order, 10**9) == pytest.approx(whole, rel=1e-9)


@given(uniform, st.integers(0, 3), st.integers(1, 4000))
def test_uniform_moments_equal_the_sum_over_all_lengths(
    lengths: UniformLength, order: int, limit: int
) -> None:
    every = range(lengths.low, lengths.high + 1)
    direct = sum(value**order for value in every if value <= limit) / len(every)
    assert lengths.raw_moment(order, limit) == pytest.approx(direct, rel=1e-12)


@given(log_normal, st.integers(1, 20_000))
def test_log_normal_moments_equal_an_integral_over_its_quantiles(
    lengths: LogNormalLength, limit: int
) -> None:
    count = 2000
    points = [lengths.quantile((at + 0.5) / count) for at in range(count)]
    direct = sum(min(point, limit) for point in points) / count
    assert lengths.clipped_mean(limit) == pytest.approx(direct, rel=0.01, abs=0.6)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_a_histogram_keeps_mean_and_quantiles_of_its_values(values: list[int]) -> None:
    lengths = fit_empirical_length(values)
    assert lengths.mean() == pytest.approx(sum(values) / len(values), rel=1e-12)
    assert lengths.quantile(0) == min(values)
    assert lengths.quantile(1) == max(values)
    assert lengths.quantile(0.5) == sorted(values)[-(-len(values) // 2) - 1]


def test_lengths_of_no_weight_are_never_drawn() -> None:
    lengths = EmpiricalLength(values=(1, 2, 3), weights=(0.0, 1.0, 0.0))
    assert lengths.quantile(0) == lengths.quantile(1) == 2
    assert set(lengths.sample(Random(0), 1000)) == {2}


def test_the_median_of_a_log_normal_is_its_median() -> None:
    assert LogNormalLength(median=700, sigma=1.1).quantile(0.5) == 700


def test_a_log_normal_without_spread_is_fixed() -> None:
    lengths = LogNormalLength(median=700, sigma=0)
    assert lengths.mean() == 700
    assert lengths.quantile(0) == lengths.quantile(1) == 700


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: FixedLength(tokens=0), "tokens"),
        (lambda: FixedLength(tokens=10**400), "tokens"),
        (lambda: UniformLength(low=5, high=4), "low"),
        (lambda: LogNormalLength(median=0.5, sigma=1), "median"),
        (lambda: LogNormalLength(median=100, sigma=math.nan), "sigma"),
        (lambda: LogNormalLength(median=100, sigma=-1), "sigma"),
        (lambda: EmpiricalLength(values=(), weights=()), "weights"),
        (lambda: EmpiricalLength(values=(1, 2), weights=(1.0,)), "weights"),
        (lambda: EmpiricalLength(values=(2, 1), weights=(1.0, 1.0)), "values"),
        (lambda: EmpiricalLength(values=(1,), weights=(0.0,)), "weights"),
        (lambda: EmpiricalLength(values=(1,), weights=(math.inf,)), "weights[0]"),
        (lambda: FixedLength(tokens=4).quantile(1.5), "share"),
    ],
)
def test_impossible_lengths_are_refused_by_field(build: object, field: str) -> None:
    assert callable(build)
    with pytest.raises(InputError) as caught:
        build()
    assert caught.value.problems[0].where == field
