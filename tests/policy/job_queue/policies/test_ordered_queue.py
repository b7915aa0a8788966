"""Queues in order: strict ones wait for their head, others let pass whoever fits."""

from meshwright.policy.job_queue import CountedPool, JobRequest, QueuedJob
from meshwright.policy.job_queue.policies.ordered_queue import GreedyOrderPolicy, StrictOrderPolicy
from meshwright.policy.job_queue.sort_keys import by_estimate


def job(index: int, gpus: float, estimate_s: float = 1.0) -> QueuedJob:
    ask = JobRequest(job_id=str(index), submit_s=float(index), gpus=gpus, estimate_s=estimate_s)
    return QueuedJob(index, ask)


def test_nobody_passes_the_head_of_a_strict_queue() -> None:
    queue, pool = StrictOrderPolicy(), CountedPool(8)
    for index, gpus in enumerate((6, 4, 1)):
        queue.on_submit(job(index, gpus), 0)
    assert [one.index for one in queue.decide(0, pool).starts] == [0]
    assert len(queue) == 2
    assert pool.free == 2


def test_whoever_fits_passes_those_who_do_not() -> None:
    queue, pool = GreedyOrderPolicy(), CountedPool(8)
    for index, gpus in enumerate((6, 4, 1, 4, 1)):
        queue.on_submit(job(index, gpus), 0)
    assert [one.index for one in queue.decide(0, pool).starts] == [0, 2, 4]
    assert len(queue) == 2


def test_the_order_decides_and_arrival_between_equals() -> None:
    queue, pool = StrictOrderPolicy(by_estimate), CountedPool(3)
    for index, estimate_s in enumerate((9.0, 3.0, 3.0, 1.0)):
        queue.on_submit(job(index, 1, estimate_s), 0)
    assert [one.index for one in queue.decide(0, pool).starts] == [3, 1, 2]
