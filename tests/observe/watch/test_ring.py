from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.watch.ring import Held, to_drop
from meshwright.observe.watch.stall import limit_s

HELD = st.builds(Held, st.integers(0, 1000), st.integers(1, 100), st.booleans())


def test_oldest_go_first_and_pinned_ones_last() -> None:
    held = [Held(1, 10, True), Held(2, 10, False), Held(3, 10, False), Held(4, 10, False)]
    assert to_drop(held, most=2, most_bytes=1000) == (2, 3)
    assert to_drop(held, most=9, most_bytes=15) == (2, 3, 1)


@given(st.lists(HELD, unique_by=lambda one: one.number), st.integers(1, 20), st.integers(1, 500))
def test_bounds_hold_but_for_the_newest(held: list[Held], most: int, most_bytes: int) -> None:
    gone = set(to_drop(held, most, most_bytes))
    left = [one for one in held if one.number not in gone]
    assert len(left) <= most
    assert len(left) <= 1 or sum(one.num_bytes for one in left) <= most_bytes
    if held:
        assert max(held) in left


def test_patience_grows_with_the_step_and_is_longer_before_the_first() -> None:
    assert limit_s(60, 1.0) == 60
    assert limit_s(60, 100.0) == 500
    assert limit_s(60, None) == 300
