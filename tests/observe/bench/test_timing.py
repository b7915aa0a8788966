"""Samples: of calls in turn, or taken by the case itself."""

from meshwright.observe.bench.timing import LAST_CACHE, HostTimer, Work, sets_of_inputs


def test_calls_are_taken_in_turn() -> None:
    done = list[int]()
    calls = tuple((lambda number=number: done.append(number)) for number in range(3))
    HostTimer(budget_s=0.0).time(Work(calls))
    assert done == [0, 1, 2, 0]  # the first only warms up


def test_a_case_may_take_its_own_samples() -> None:
    left = iter([9.0, 3.0, 1.0, 2.0])
    timed = HostTimer(budget_s=0.0).time(Work((), sample=lambda: next(left)))
    assert timed.samples == (3.0, 1.0, 2.0)
    assert (timed.seconds, timed.quantile(0.0), timed.quantile(1.0)) == (2.0, 1.0, 3.0)


def test_sets_of_inputs_together_are_larger_than_the_last_cache() -> None:
    assert sets_of_inputs(LAST_CACHE) == 1
    assert sets_of_inputs(LAST_CACHE / 2.5) == 3
    assert sets_of_inputs(1.0) == 8
