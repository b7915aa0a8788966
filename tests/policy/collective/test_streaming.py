"""An algorithm on parts of the message, one behind the other, is still that algorithm."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import Op, build, verify
from meshwright.policy.collective.streaming import WHOLE, streamed


@pytest.mark.parametrize("op", WHOLE)
def test_parts_together_keep_the_promise_of_the_whole(op: Op) -> None:
    whole = build("binary_tree", op, 4)
    parts = streamed(whole, 3)
    assert verify(parts).sound
    assert (parts.chunks, parts.steps) == (3 * whole.chunks, whole.steps + 2)
    assert parts.moves == 3 * whole.moves


def test_parts_have_lanes_of_their_own() -> None:
    whole = build("ring", "all_reduce", 4, channels=2)
    assert streamed(whole, 3).channels == 6


def test_one_part_is_the_collective_itself() -> None:
    whole = build("ring", "all_reduce", 4)
    assert streamed(whole, 1) is whole


def test_chunks_that_belong_to_ranks_are_not_cut() -> None:
    with pytest.raises(InputError, match="belong to ranks"):
        streamed(build("ring", "all_gather", 4), 2)
