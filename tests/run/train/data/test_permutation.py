"""The keyed shuffle: a bijection for every count, the same on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.train.data.permutation import make_permutation_key, permute_indices


def test_every_small_count_is_shuffled_without_loss() -> None:
    for count in range(1, 300):
        found = permute_indices(np.arange(count), count, make_permutation_key("seed", count))
        assert np.array_equal(np.sort(found), np.arange(count))


def test_a_count_beyond_one_chunk_is_shuffled_without_loss() -> None:
    count = 100_003
    found = permute_indices(np.arange(count), count, make_permutation_key(5))
    assert np.array_equal(np.sort(found), np.arange(count))


@given(st.integers(2, 2**61), st.integers(0, 2**32), st.data())
def test_places_of_a_huge_count_stay_apart_and_inside(
    count: int, seed: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=50))
    found = permute_indices(np.array(places, np.int64), count, make_permutation_key(seed))
    assert len(set(found.tolist())) == len(places)
    assert all(0 <= one < count for one in found.tolist())


def test_a_place_goes_to_the_same_alone_and_among_others() -> None:
    key = make_permutation_key(1)
    together = permute_indices(np.arange(50_000), 50_000, key)
    some = np.array([0, 7, 32_767, 32_768, 49_999])
    assert np.array_equal(permute_indices(some, 50_000, key), together[some])


def test_the_order_of_a_seed_never_changes() -> None:
    # A run that goes on after an upgrade must read on where it was: these numbers are for good.
    assert permute_indices(np.arange(10), 10, make_permutation_key(0)).tolist() == [
        6,
        1,
        0,
        5,
        7,
        4,
        9,
        8,
        2,
        3,
    ]
    large = permute_indices(np.array([0, 1, 2]), 10**12, make_permutation_key(0, "x"))
    assert large.tolist() == [75206711960, 237927609625, 901703659977]


def test_other_keys_give_other_orders() -> None:
    orders = {
        tuple(permute_indices(np.arange(20), 20, make_permutation_key(seed)).tolist())
        for seed in range(100)
    }
    assert len(orders) == 100


@pytest.mark.parametrize("count", [16, 50, 1000])
def test_every_place_is_equally_likely(count: int) -> None:
    trials, first = 4000, np.arange(3)
    found = np.array(
        [permute_indices(first, count, make_permutation_key(seed)) for seed in range(trials)]
    )
    hits = np.array([np.bincount(found[:, place] * 16 // count, minlength=16) for place in first])
    expected = np.diff(np.ceil(np.arange(17) * count / 16)) / count * trials
    # Chi-square with 15 degrees of freedom exceeds 44.3 once in ten thousand.
    assert (((hits - expected) ** 2 / expected).sum(axis=1) < 44.3).all()


def test_neighbours_do_not_stay_neighbours() -> None:
    found = permute_indices(np.arange(10**5), 10**5, make_permutation_key(9))
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(found)) == 1).sum() < 20


def test_parts_of_a_key_are_kept_apart() -> None:
    assert make_permutation_key(1, 23) != make_permutation_key(12, 3)
