"""Samples: of calls in turn, or taken by the case itself."""

from meshwright.observe.bench.timing import (
    LAST_LEVEL_CACHE_BYTES,
    HostTimer,
    TimedWork,
    count_input_sets,
)


def test_calls_are_taken_in_turn() -> None:
    done = list[int]()
    calls = tuple((lambda number=number: done.append(number)) for number in range(3))
    HostTimer(budget_s=0.0).time(TimedWork(calls))
    assert done == [0, 1, 2, 0]  # the first only warms up


def test_a_case_may_take_its_own_samples() -> None:
    left = iter([9.0, 3.0, 1.0, 2.0])
    timed = HostTimer(budget_s=0.0).time(TimedWork((), sample=lambda: next(left)))
    assert timed.samples_s == (3.0, 1.0, 2.0)
    assert (timed.median_s, timed.quantile(0.0), timed.quantile(1.0)) == (2.0, 1.0, 3.0)


def test_sets_of_inputs_together_are_larger_than_the_last_cache() -> None:
    assert count_input_sets(LAST_LEVEL_CACHE_BYTES) == 1
    assert count_input_sets(LAST_LEVEL_CACHE_BYTES / 2.5) == 3
    assert count_input_sets(1.0) == 8
