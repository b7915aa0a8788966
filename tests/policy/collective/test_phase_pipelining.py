"""An algorithm on parts of the message, one behind the other, is still that algorithm."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import CollectiveOp, build_algorithm, verify_collective
from meshwright.policy.collective.phase_pipelining import UNPARTITIONED_OPS, pipeline_phases


@pytest.mark.parametrize("op", UNPARTITIONED_OPS)
def test_parts_together_keep_the_promise_of_the_whole(op: CollectiveOp) -> None:
    whole = build_algorithm("binary_tree", op, 4)
    parts = pipeline_phases(whole, 3)
    assert verify_collective(parts).is_correct
    assert (parts.chunks, parts.steps) == (3 * whole.chunks, whole.steps + 2)
    assert parts.moves == 3 * whole.moves


def test_parts_have_lanes_of_their_own() -> None:
    whole = build_algorithm("ring", "all_reduce", 4, channels=2)
    assert pipeline_phases(whole, 3).channels == 6


def test_one_part_is_the_collective_itself() -> None:
    whole = build_algorithm("ring", "all_reduce", 4)
    assert pipeline_phases(whole, 1) is whole


def test_chunks_that_belong_to_ranks_are_not_cut() -> None:
    with pytest.raises(InputError, match="belong to ranks"):
        pipeline_phases(build_algorithm("ring", "all_gather", 4), 2)
