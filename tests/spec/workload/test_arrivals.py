import math
from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.workload import (
    Arrivals,
    ConstantArrivals,
    FixedConcurrency,
    GammaArrivals,
    PoissonArrivals,
    RecordedArrivals,
)

rates = st.floats(0.001, 10_000)
streams = st.one_of(
    st.builds(ConstantArrivals, rate_per_s=rates),
    st.builds(PoissonArrivals, rate_per_s=rates),
    st.builds(GammaArrivals, rate_per_s=rates, cv=st.floats(0.05, 4)),
)


@given(streams)
def test_times_never_fall_and_are_not_negative(arrival: Arrivals) -> None:
    times = list(islice(arrival.times_s(Random(1)), 200))
    assert times[0] >= 0
    assert times == sorted(times)


@given(streams)
def test_the_mean_rate_is_the_given_rate(
    arrival: ConstantArrivals | PoissonArrivals | GammaArrivals,
) -> None:
    count = 5000
    last = list(islice(arrival.times_s(Random(4)), count))[-1]
    cv = arrival.cv if isinstance(arrival, GammaArrivals) else 1.0
    assert count / last == pytest.approx(arrival.rate_per_s, rel=6 * cv / math.sqrt(count))


@pytest.mark.parametrize("cv", [0.2, 1.0, 3.0])
def test_gaps_of_a_gamma_stream_vary_as_asked(cv: float) -> None:
    times = list(islice(GammaArrivals(rate_per_s=2, cv=cv).times_s(Random(2)), 40_000))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(cv, rel=0.05)


@given(streams, st.integers(0, 2**64))
def test_the_same_seed_gives_the_same_times(arrival: Arrivals, seed: int) -> None:
    one = list(islice(arrival.times_s(Random(seed)), 20))
    assert one == list(islice(arrival.times_s(Random(seed)), 20))


def test_a_constant_stream_starts_at_once() -> None:
    assert list(islice(ConstantArrivals(rate_per_s=4).times_s(Random(0)), 3)) == [0, 0.25, 0.5]


def test_given_times_come_back_as_given() -> None:
    arrival = RecordedArrivals(at_s=(0.0, 1.0, 1.0, 4.0))
    assert tuple(arrival.times_s(Random(0))) == arrival.at_s
    assert arrival.rate_per_s == 0.75


def test_a_closed_loop_has_no_rate_of_its_own() -> None:
    assert FixedConcurrency(in_flight=8).rate_per_s is None
    assert RecordedArrivals(at_s=(1.0,)).rate_per_s is None


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: PoissonArrivals(rate_per_s=0), "rate_per_s"),
        (lambda: PoissonArrivals(rate_per_s=math.nan), "rate_per_s"),
        (lambda: GammaArrivals(rate_per_s=1, cv=0), "cv"),
        (lambda: RecordedArrivals(at_s=()), "at_s"),
        (lambda: RecordedArrivals(at_s=(2.0, 1.0)), "at_s[1]"),
        (lambda: RecordedArrivals(at_s=(-1.0,)), "at_s[0]"),
        (lambda: FixedConcurrency(in_flight=0), "in_flight"),
    ],
)
def test_impossible_arrivals_are_refused_by_field(build: object, field: str) -> None:
    assert callable(build)
    with pytest.raises(InputError) as caught:
        build()
    assert caught.value.problems[0].where == field
