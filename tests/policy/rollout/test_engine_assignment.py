"""Which engine draws a sample: for whom numbers decide, and for whom load does."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.rollout import EngineAssigner


@given(st.integers(1, 9), st.lists(st.integers(0, 99), max_size=60))
def test_by_number_a_group_has_one_engine_whatever_was_sent_before(
    engines: int, groups: list[int]
) -> None:
    dealer = EngineAssigner(engines)
    for group in groups:
        chosen = dealer.assign(group, 100)
        assert 0 <= chosen < engines
        assert chosen == EngineAssigner(engines).assign(group, 5), "a new life is asked the same"


def test_groups_in_their_order_are_dealt_out_evenly() -> None:
    dealer = EngineAssigner(4)
    assert set(Counter(dealer.assign(group, 1) for group in range(40)).values()) == {10}


def test_samples_of_no_group_go_around() -> None:
    dealer = EngineAssigner(3)
    assert set(Counter(dealer.assign(None, 1) for _ in range(9)).values()) == {3}


def test_by_load_each_sample_goes_where_least_is_open() -> None:
    dealer = EngineAssigner(2, "least-loaded")
    assert [dealer.assign(0, 10) for _ in range(4)] == [0, 1, 0, 1]
    for _ in range(2):
        dealer.release(1, 10)
    assert [dealer.assign(0, 10) for _ in range(2)] == [1, 1]
