"""Blending: exact proportions in every stretch, found in constant time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.train.data import blend
from meshwright.run.train.data.blend import MAX_PERIOD, Blend, compute_integer_quotas

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8)


def test_decimal_weights_are_met_exactly() -> None:
    assert compute_integer_quotas([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert compute_integer_quotas([3, 1]) == [3, 1]
    assert compute_integer_quotas([0.5]) == [1]


def test_weights_without_a_short_period_are_met_to_one_part_in_it() -> None:
    weights = [np.pi, np.e, 1.0]
    found = np.array(compute_integer_quotas(weights))
    assert found.sum() == MAX_PERIOD
    assert np.abs(found / found.sum() - np.array(weights) / sum(weights)).max() < 1 / MAX_PERIOD


@given(WEIGHTS)
def test_no_source_is_forgotten(weights: list[float]) -> None:
    assert min(compute_integer_quotas(weights)) >= 1


def test_many_tiny_sources_leave_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend, "MAX_PERIOD", 64)
    found = compute_integer_quotas([1e-9] * 30 + [1.0] * 30)
    assert min(found) == 1
    assert sum(found) == 120


@given(WEIGHTS, st.integers(0, 10**12))
def test_places_count_the_sequences_of_each_source(weights: list[float], first: int) -> None:
    row = Blend(weights)
    drawn = row.select_sources(np.arange(first, first + 200))
    before = row.select_sources(np.arange(first, first + 201))
    for source in range(len(weights)):
        places = drawn.source_index[drawn.source == source]
        assert np.array_equal(np.diff(places), np.ones(max(0, len(places) - 1)))
    assert np.array_equal(before.source[:200], drawn.source)


def test_places_begin_at_zero() -> None:
    drawn = Blend([0.5, 0.3, 0.2]).select_sources(np.arange(1000))
    assert [int(drawn.source_index[drawn.source == one].min()) for one in range(3)] == [0, 0, 0]


@given(WEIGHTS)
def test_every_stretch_keeps_the_proportions(weights: list[float]) -> None:
    row = Blend(weights)
    drawn = row.select_sources(np.arange(2000))
    shares = row.quotas / row.period
    done = np.arange(1, 2001)
    for source, share in enumerate(shares):
        count = np.cumsum(drawn.source == source)
        # Sainte-Laguë strays by less than half a sequence for each other source, and one.
        assert np.abs(count - share * done).max() <= 1 + len(weights) / 2


@pytest.mark.parametrize("world", [2, 4, 8])
def test_equal_stretches_of_a_step_are_mixed_alike(world: int) -> None:
    source = Blend([0.5, 0.25, 0.25]).select_sources(np.arange(64)).source.reshape(world, -1)
    counts = [np.bincount(row, minlength=3) for row in source]
    assert np.ptp(counts, axis=0).max() <= 1
