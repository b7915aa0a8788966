"""A job of high priority stops others, the least important, and no more than it needs."""

import pytest

from meshwright.policy.job_queue import (
    CountedPool,
    JobRequest,
    NodePool,
    QueuedJob,
    make_uniform_nodes,
)
from meshwright.policy.job_queue.policies.preemption import PreemptivePriorityPolicy
from meshwright.predict.job_queue import PreemptionCosts, simulate_queue


def job(index: int, gpus: float, priority: float) -> QueuedJob:
    return QueuedJob(
        index, JobRequest(job_id=str(index), submit_s=0.0, gpus=gpus, priority=priority)
    )


def test_the_least_important_and_latest_are_stopped() -> None:
    queue, pool = PreemptivePriorityPolicy(), CountedPool(8)
    running = [job(0, 2, 1), job(1, 2, 0), job(2, 2, 0), job(3, 2, 5)]
    for one in running:
        queue.on_submit(one, 0)
    queue.decide(0, pool)
    queue.on_submit(job(4, 2, 3), 1)
    moves = queue.decide(1, pool)
    assert [one.index for one in moves.starts] == [4]
    assert [one.index for one in moves.preemptions] == [2]


def test_nobody_is_stopped_where_it_would_not_be_enough() -> None:
    queue, pool = PreemptivePriorityPolicy(), CountedPool(8)
    for one in (job(0, 6, 5), job(1, 2, 0)):
        queue.on_submit(one, 0)
    queue.decide(0, pool)
    queue.on_submit(job(2, 4, 3), 1)
    moves = queue.decide(1, pool)
    assert not moves.starts
    assert not moves.preemptions
    assert pool.free == 0


def test_only_what_stands_in_the_way_is_stopped() -> None:
    queue, pool = PreemptivePriorityPolicy(), NodePool(make_uniform_nodes(16, 8), "consolidate")
    for one in (job(0, 8, 1), job(1, 4, 0), job(2, 4, 0)):
        queue.on_submit(one, 0)
    queue.decide(0, pool)
    queue.on_submit(job(3, 8, 3), 1)
    moves = queue.decide(1, pool)
    # The two small ones on one node go; the large one on the other is more important.
    assert sorted(one.index for one in moves.preemptions) == [1, 2]


def test_stopped_work_is_kept_and_what_stopping_costs_is_counted() -> None:
    asks = [
        JobRequest(job_id="low", submit_s=0, gpus=4, priority=0),
        JobRequest(job_id="high", submit_s=100, gpus=4, priority=1),
    ]
    costs = PreemptionCosts(startup_s=10, checkpoint_s=5, restore_s=20)
    ran = simulate_queue(
        asks, [200.0, 50.0], CountedPool(4), PreemptivePriorityPolicy(), costs=costs
    )
    assert ran.end_s.tolist() == [100 + 60 + 35 + 110, 160]
    assert ran.preempted.tolist() == [1, 0]
    assert ran.paused_gpu_s == pytest.approx([4 * 45, 4 * 10])
    assert ran.lost_gpu_s.tolist() == [0, 0]
