from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.watch.capture_store import StoredCapture, select_evictions
from meshwright.observe.watch.hang_report import compute_hang_timeout_s

HELD = st.builds(StoredCapture, st.integers(0, 1000), st.integers(1, 100), st.booleans())


def test_oldest_go_first_and_pinned_ones_last() -> None:
    held = [
        StoredCapture(1, 10, True),
        StoredCapture(2, 10, False),
        StoredCapture(3, 10, False),
        StoredCapture(4, 10, False),
    ]
    assert select_evictions(held, most=2, most_bytes=1000) == (2, 3)
    assert select_evictions(held, most=9, most_bytes=15) == (2, 3, 1)


@given(st.lists(HELD, unique_by=lambda one: one.number), st.integers(1, 20), st.integers(1, 500))
def test_bounds_hold_but_for_the_newest(
    held: list[StoredCapture], most: int, most_bytes: int
) -> None:
    gone = set(select_evictions(held, most, most_bytes))
    left = [one for one in held if one.number not in gone]
    assert len(left) <= most
    assert len(left) <= 1 or sum(one.num_bytes for one in left) <= most_bytes
    if held:
        assert max(held) in left


def test_patience_grows_with_the_step_and_is_longer_before_the_first() -> None:
    assert compute_hang_timeout_s(60, 1.0) == 60
    assert compute_hang_timeout_s(60, 100.0) == 500
    assert compute_hang_timeout_s(60, None) == 300
