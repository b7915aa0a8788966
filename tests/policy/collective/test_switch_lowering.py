"""Switches find hosts among the ranks, and the collective stays what it was."""

from collections import Counter

import pytest

from meshwright.policy.collective import (
    Collective,
    CollectiveBuilder,
    build_algorithm,
    verify_collective,
)
from meshwright.policy.collective.switch_lowering import lower_switches
from tests.policy.collective.gallery import gallery, label

SWITCHED = [collective for collective in gallery() if collective.switches]


@pytest.mark.parametrize("collective", SWITCHED, ids=label)
def test_a_hosted_collective_is_sound_and_has_no_switches(collective: Collective) -> None:
    plain = lower_switches(collective)
    assert not plain.switches
    assert verify_collective(plain).is_correct, verify_collective(plain).problems


def test_a_collective_without_switches_is_its_own() -> None:
    ring = build_algorithm("ring", "all_reduce", 4)
    assert lower_switches(ring) is ring


def test_the_cells_of_a_switch_spread_over_the_ranks_that_write_to_it() -> None:
    plain = lower_switches(build_algorithm("nvls", "all_reduce", 4))
    adds = Counter(
        int(dst)
        for _, moves in plain.iterate_steps()
        for dst, added in zip(moves.dst, moves.adds, strict=True)
        if added
    )
    assert set(adds.values()) == {3}
    assert set(adds) == {0, 1, 2, 3}


def test_what_a_switch_adds_at_once_a_host_adds_one_after_the_other() -> None:
    builder = CollectiveBuilder("star", "all_reduce", ranks=3, chunks=1, switches=["hub"])
    with builder.step():
        for rank in range(3):
            builder.add(rank, 3, chunk=0)
    with builder.step():
        for rank in range(3):
            builder.copy(3, rank, chunk=0)
    plain = lower_switches(builder.build())
    assert plain.steps == 4
    assert plain.slots == 2
    assert verify_collective(plain).is_correct
