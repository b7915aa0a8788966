"""Pickled arrays are read, and nothing else that a pickle can hold."""

import os
import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.fleet.sources.public_traces.numpy_pickle import read_arrays


class Runs:
    """Would call a function of the system, if it were unpickled as Python does."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_of_numbers_come_back(protocol: int) -> None:
    table = np.arange(6, dtype=">i4").reshape(2, 3)
    given: list[Any] = [np.linspace(0, 1, 50), table, 7, None, "name"]
    if protocol == 2:
        # Bytes had no opcode then, and stand as a call.
        with pytest.raises(InputError, match="refused"):
            read_arrays(pickle.dumps(given, protocol), "x")
        return
    found = read_arrays(pickle.dumps(given, protocol), "x")
    for mine, theirs in zip(found, given, strict=True):
        assert np.array_equal(mine, theirs)


def test_an_array_that_is_shared_is_read_once() -> None:
    one = np.arange(3.0)
    first, second = read_arrays(pickle.dumps([one, one], 4), "x")
    assert first is second


def test_columns_first_stays_so() -> None:
    given = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    (found,) = read_arrays(pickle.dumps([given], 4), "x")
    assert np.array_equal(found, given)


@pytest.mark.parametrize(
    "given",
    [
        [Runs()],
        [OrderedDict(a=1)],
        [np.array([{"a": 1}], dtype=object)],
        [np.zeros(2, dtype=[("a", "f8")])],
        [{"a": 1}],
        [os.system],
    ],
    ids=["a call", "a class", "objects", "records", "a dict", "a function"],
)
def test_anything_else_is_refused(given: list[object]) -> None:
    with pytest.raises(InputError, match="refused"):
        read_arrays(pickle.dumps(given, 4), "x")


def test_a_name_of_numpy_that_is_no_array_is_refused() -> None:
    with pytest.raises(InputError, match=r"asks for numpy.fromfile|refused"):
        read_arrays(b"\x80\x04\x8c\x05numpy\x8c\x08fromfile\x93.", "x")


def test_a_pickle_that_breaks_off_is_told() -> None:
    raw = pickle.dumps([np.arange(100.0)], 4)
    for length in (1, 20, len(raw) // 2, len(raw) - 1):
        with pytest.raises(DamagedFile):
            read_arrays(raw[:length], "x")


def test_what_is_no_list_is_refused() -> None:
    with pytest.raises(InputError, match="no list"):
        read_arrays(pickle.dumps(3, 4), "x")
