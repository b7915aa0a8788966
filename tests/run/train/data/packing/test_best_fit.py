"""Best-fit packing against an obvious one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.train.data.packing.best_fit import best_fit


def obvious(lengths: list[int], room: int) -> list[int]:
    """Return the bins' loads when each item, longest first, goes where least room is left over."""
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [load for load in bins if load + length <= room]
        if fitting:
            bins.remove(max(fitting))
            bins.append(max(fitting) + length)
        else:
            bins.append(length)
    return sorted(bins)


@given(st.integers(1, 64).flatmap(
    lambda room: st.tuples(st.lists(st.integers(1, room), max_size=80), st.just(room))
))  # fmt: skip
def test_it_fills_bins_as_the_obvious_way_does(case: tuple[list[int], int]) -> None:
    lengths, room = case
    found = best_fit(np.array(lengths, np.int64), room)
    loads = np.bincount(found, weights=lengths) if lengths else np.empty(0)
    assert sorted(loads.astype(int).tolist()) == obvious(lengths, room)


def test_text_fills_sequences_almost_to_the_brim() -> None:
    lengths = np.random.default_rng(0).lognormal(6.4, 1.2, 20_000).astype(np.int64) + 1
    lengths = np.minimum(lengths, 4096)
    assert lengths.sum() / ((best_fit(lengths, 4096).max() + 1) * 4096) > 0.998
