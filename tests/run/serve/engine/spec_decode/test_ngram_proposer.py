"""Proposals come from the text itself, and fewer while they turn out wrong."""

import pytest

pytest.importorskip("torch", reason="the package of sampling works on torch tensors")

from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.serve.engine.spec_decode.ngram_proposer import NgramIndex


def test_a_lookup_proposes_what_followed_the_last_time() -> None:
    lookup = NgramIndex([1, 2, 3, 4, 9, 1, 2, 7, 5, 1, 2])
    assert lookup.propose(3) == [7, 5, 1]
    lookup.add([3])
    assert lookup.propose(2) == [4, 9]
    lookup.add([8])
    assert lookup.propose(4) == []
    assert NgramIndex([]).propose(4) == []
    assert NgramIndex([5, 5, 5, 5]).propose(2) == [5]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_what_is_proposed_did_follow_the_longest_ending_that_came_before(
    tokens: list[int], most: int
) -> None:
    wanted: list[int] = []
    for length in (4, 3, 2):
        ending = tokens[-length:]
        places = [at for at in range(length, len(tokens)) if tokens[at - length : at] == ending]
        if places and length <= len(tokens):
            wanted = tokens[places[-1] : places[-1] + most]
            break
    assert NgramIndex(tokens).propose(most) == wanted


def test_proposals_that_come_true_make_for_more_of_them() -> None:
    text = list(range(40)) * 3
    lookup = NgramIndex(text[:42])
    at, counts = 42, []
    while at < 100:
        proposed = lookup.propose(100)
        assert proposed == text[at : at + len(proposed)]
        counts.append(len(proposed))
        lookup.add(text[at : at + len(proposed) + 1])
        at += len(proposed) + 1
    assert counts[:2] == [8, 16]


def test_proposals_that_are_wrong_again_and_again_stop_for_a_while() -> None:
    lookup = NgramIndex([1, 2, 3] * 5)
    counts = []
    for wrong in range(100, 140):
        # The same ending each time, with something new after it.
        counts.append(len(lookup.propose(8)))
        lookup.add([wrong])
        lookup.add([1, 2, 3])
    assert counts[1:4] == [4, 2, 1]
    assert 0 in counts[4:8]
    assert sum(counts[4:]) < len(counts[4:]) / 2
    assert max(counts[4:]) == 1
