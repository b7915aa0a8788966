"""Arrow arrays made of numpy's and back, chunk by chunk."""

import numpy as np
import pyarrow as pa
import pytest

from meshwright.timeline.readers.parsing.arrow_arrays import (
    integers_to_numpy,
    take_rows,
    to_bool_array,
)

CHUNKS = pa.chunked_array([["a", None], [], ["b", "c", "d"]], pa.string())


@pytest.mark.parametrize("rows", [[], [0], [1, 2, 4], [4, 0, 3, 3], [2, 2]])
def test_rows_are_taken_in_the_order_given(rows: list[int]) -> None:
    every = CHUNKS.to_pylist()
    found = take_rows(CHUNKS, np.array(rows, dtype=np.int64))
    assert found.to_pylist() == [every[row] for row in rows]
    assert found.type == pa.string()


def test_a_column_without_chunks_has_nothing_to_take() -> None:
    assert (
        take_rows(pa.chunked_array([], pa.string()), np.zeros(0, dtype=np.int64)).to_pylist() == []
    )


def test_truth_values_and_whole_numbers_are_those_given() -> None:
    values = np.arange(19) % 3 == 0
    assert to_bool_array(values).to_pylist() == values.tolist()
    assert integers_to_numpy(pa.array([3, None, 5], pa.int32())).tolist() == [3, -1, 5]
