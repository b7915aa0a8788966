"""Switches find hosts among the ranks, and the collective stays what it was."""

from collections import Counter

import pytest

from meshwright.policy.collective import Builder, Collective, build, verify
from meshwright.policy.collective.hosting import hosted
from tests.policy.collective.gallery import gallery, label

SWITCHED = [collective for collective in gallery() if collective.switches]


@pytest.mark.parametrize("collective", SWITCHED, ids=label)
def test_a_hosted_collective_is_sound_and_has_no_switches(collective: Collective) -> None:
    plain = hosted(collective)
    assert not plain.switches
    assert verify(plain).sound, verify(plain).problems


def test_a_collective_without_switches_is_its_own() -> None:
    ring = build("ring", "all_reduce", 4)
    assert hosted(ring) is ring


def test_the_cells_of_a_switch_spread_over_the_ranks_that_write_to_it() -> None:
    plain = hosted(build("nvls", "all_reduce", 4))
    adds = Counter(
        int(dst)
        for _, moves in plain.walk()
        for dst, added in zip(moves.dst, moves.adds, strict=True)
        if added
    )
    assert set(adds.values()) == {3}
    assert set(adds) == {0, 1, 2, 3}


def test_what_a_switch_adds_at_once_a_host_adds_one_after_the_other() -> None:
    builder = Builder("star", "all_reduce", ranks=3, chunks=1, switches=["hub"])
    with builder.step():
        for rank in range(3):
            builder.add(rank, 3, chunk=0)
    with builder.step():
        for rank in range(3):
            builder.copy(3, rank, chunk=0)
    plain = hosted(builder.done())
    assert plain.steps == 4
    assert plain.slots == 2
    assert verify(plain).sound
