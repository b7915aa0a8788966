"""Jobs sink as they are served; Gittins' index prefers who is likely to be done soon."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.job_queue import CountedPool, JobRequest
from meshwright.policy.job_queue.policies.least_attained_service import (
    GittinsIndex,
    LeastAttainedServicePolicy,
)
from meshwright.predict.job_queue import simulate_queue


def test_a_new_job_goes_before_one_that_has_had_much() -> None:
    asks = [
        JobRequest(job_id="long", submit_s=0, gpus=4),
        JobRequest(job_id="short", submit_s=100, gpus=4),
    ]
    ran = simulate_queue(
        asks, [1000.0, 20.0], CountedPool(4), LeastAttainedServicePolicy((200.0, 10_000.0))
    )
    assert ran.first_s.tolist() == [0, 100]
    assert ran.end_s.tolist() == [1020, 120]


def test_a_job_sinks_when_its_service_reaches_the_limit_and_not_before() -> None:
    # Two jobs on one place: the second waits until the first has had 50 GPU-seconds.
    asks = [JobRequest(job_id="a", submit_s=0, gpus=1), JobRequest(job_id="b", submit_s=10, gpus=1)]
    ran = simulate_queue(asks, [80.0, 80.0], CountedPool(1), LeastAttainedServicePolicy((50.0,)))
    assert ran.first_s.tolist() == [0, 50]
    # In the lower queue the one that runs stays ahead: each is stopped once at most.
    assert ran.preempted.sum() <= 2


def test_who_has_waited_long_comes_back_to_the_first_queue() -> None:
    asks = [JobRequest(job_id="old", submit_s=0, gpus=1)]
    asks += [JobRequest(job_id=str(at), submit_s=60.0 + 30 * at, gpus=1) for at in range(40)]
    run_s = [300.0] + [30.0] * 40
    starving = simulate_queue(asks, run_s, CountedPool(1), LeastAttainedServicePolicy((50.0,)))
    helped = simulate_queue(
        asks, run_s, CountedPool(1), LeastAttainedServicePolicy((50.0,), promote=2.0)
    )
    assert helped.end_s[0] < starving.end_s[0]


def test_the_index_of_equal_jobs_rises_and_of_many_short_ones_falls() -> None:
    equal = GittinsIndex([100.0] * 10)
    assert equal.compute_index(0) == pytest.approx(1 / 100)
    assert equal.compute_index(100) == 0
    mixed = GittinsIndex([10.0] * 90 + [10_000.0] * 10)
    assert mixed.compute_index(0) == pytest.approx(90 / (100 * 10))
    assert mixed.compute_index(50) < mixed.compute_index(0)


def test_limits_that_do_not_rise_are_refused() -> None:
    with pytest.raises(InputError, match="do not rise"):
        LeastAttainedServicePolicy((100.0, 50.0))
