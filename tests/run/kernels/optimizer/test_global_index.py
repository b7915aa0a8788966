"""Places of a shard's elements in the whole, as kernels are told them."""

import pytest

pytest.importorskip("torch", reason="places are tables on a device")

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.run.kernels.optimizer.global_index import (
    MAX_PERIOD,
    GlobalIndexMap,
    IndexGap,
    count_max_gaps,
    make_index_table,
)

CHUNK = 16384


@given(st.integers(1, MAX_PERIOD), st.integers(0, MAX_PERIOD + CHUNK - 1))
@example(MAX_PERIOD, MAX_PERIOD + CHUNK - 1)
@example(1, MAX_PERIOD)
@example(2**30, 2**30 - 1)
@example(2**30 + 1, 2**31 - 2**15)
def test_division_by_multiplication_is_exact(period: int, number: int) -> None:
    row = make_index_table([GlobalIndexMap(0, 0, period, period + 1)], torch.device("cpu"))[
        0
    ].tolist()
    factor, bits = row[4], row[5]
    assert factor < 2**32
    assert (2 * number * factor >> 32) >> bits == number // period


def test_a_run_beside_shards_with_gaps_has_as_many_numbers_and_no_gap() -> None:
    places = [GlobalIndexMap(7), GlobalIndexMap(0, 3, 10, 20, (IndexGap(5, 5), IndexGap(8, 2)))]
    assert count_max_gaps(places) == 2
    run, other = make_index_table(places, torch.device("cpu"))
    assert len(run) == len(other)
    assert run[2] == run[3]  # periods follow one another
    assert all(begin > MAX_PERIOD + CHUNK for begin in run[6::2])
    assert other[6:].tolist() == [5, 5, 8, 2]


def test_runs_alone_are_their_first_places() -> None:
    assert make_index_table(
        [GlobalIndexMap(7), GlobalIndexMap()], torch.device("cpu")
    ).tolist() == [[7], [0]]


def test_places_count_periods_and_gaps() -> None:
    places = GlobalIndexMap(100, 4, 5, 50, (IndexGap(3, 10),))
    # Numbers 4 to 11: the last of a period of five, the next whole one, two of a third.
    assert places.from_ranges(8).tolist() == [114, 150, 151, 152, 163, 164, 200, 201]
