from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.watch.overhead_budget import (
    FIRST_COST_S,
    WatchOverhead,
    choose_capture_interval,
    estimate_capture_cost_s,
    find_next_capture_step,
    is_affordable,
    may_overdraw,
)


def test_stride_is_the_least_power_of_two_that_pays_for_a_capture() -> None:
    # 0.2 s at 1 % is paid for by 20 s: 200 steps of 0.1 s.
    assert choose_capture_interval(WatchOverhead(0, 0, cost_s=0.2, step_s=0.1), 0.01) == 256
    assert choose_capture_interval(WatchOverhead(0, 0, cost_s=0.2, step_s=30.0), 0.01) == 1


@given(
    cost_s=st.floats(0.001, 20),
    step_s=st.floats(0.001, 60),
    share=st.floats(0.001, 0.05),
    steps=st.integers(1, 3000),
)
def test_captures_at_the_stride_never_exceed_their_share(
    cost_s: float, step_s: float, share: float, steps: int
) -> None:
    spent_s, every = 0.0, choose_capture_interval(WatchOverhead(0, 0, cost_s, step_s), share)
    for step in range(1, steps):
        now = WatchOverhead(step * step_s, spent_s, cost_s, step_s)
        if step % every == 0 and is_affordable(now, share):
            spent_s += cost_s
        assert spent_s <= share * step * step_s


def test_a_trigger_may_borrow_one_capture_and_no_more() -> None:
    assert may_overdraw(WatchOverhead(10, 0.1, cost_s=0.5, step_s=1), 0.01)
    assert may_overdraw(WatchOverhead(10, 0.6, cost_s=0.5, step_s=1), 0.01)
    assert not may_overdraw(WatchOverhead(10, 0.61, cost_s=0.5, step_s=1), 0.01)


def test_next_step_is_a_multiple_that_is_not_passed() -> None:
    assert [find_next_capture_step(step, 8) for step in (1, 8, 9)] == [8, 8, 16]


def test_first_capture_does_not_count_once_there_are_others() -> None:
    assert estimate_capture_cost_s([]) == FIRST_COST_S
    assert estimate_capture_cost_s([4.0]) == 4.0
    assert estimate_capture_cost_s([4.0, 0.2, 0.3]) == 0.3
