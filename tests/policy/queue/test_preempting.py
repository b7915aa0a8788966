"""A job of high priority stops others, the least important, and no more than it needs."""

import pytest

from meshwright.policy.queue import Ask, Counted, Nodes, Standing, even_nodes
from meshwright.policy.queue.preempting import Preempting
from meshwright.predict.queue import Costs, simulate


def job(index: int, gpus: float, priority: float) -> Standing:
    return Standing(index, Ask(job=str(index), submit_s=0.0, gpus=gpus, priority=priority))


def test_the_least_important_and_latest_are_stopped() -> None:
    queue, pool = Preempting(), Counted(8)
    running = [job(0, 2, 1), job(1, 2, 0), job(2, 2, 0), job(3, 2, 5)]
    for one in running:
        queue.arrives(one, 0)
    queue.decide(0, pool)
    queue.arrives(job(4, 2, 3), 1)
    moves = queue.decide(1, pool)
    assert [one.index for one in moves.starts] == [4]
    assert [one.index for one in moves.stops] == [2]


def test_nobody_is_stopped_where_it_would_not_be_enough() -> None:
    queue, pool = Preempting(), Counted(8)
    for one in (job(0, 6, 5), job(1, 2, 0)):
        queue.arrives(one, 0)
    queue.decide(0, pool)
    queue.arrives(job(2, 4, 3), 1)
    moves = queue.decide(1, pool)
    assert not moves.starts
    assert not moves.stops
    assert pool.free == 0


def test_only_what_stands_in_the_way_is_stopped() -> None:
    queue, pool = Preempting(), Nodes(even_nodes(16, 8), "consolidate")
    for one in (job(0, 8, 1), job(1, 4, 0), job(2, 4, 0)):
        queue.arrives(one, 0)
    queue.decide(0, pool)
    queue.arrives(job(3, 8, 3), 1)
    moves = queue.decide(1, pool)
    # The two small ones on one node go; the large one on the other is more important.
    assert sorted(one.index for one in moves.stops) == [1, 2]


def test_stopped_work_is_kept_and_what_stopping_costs_is_counted() -> None:
    asks = [
        Ask(job="low", submit_s=0, gpus=4, priority=0),
        Ask(job="high", submit_s=100, gpus=4, priority=1),
    ]
    costs = Costs(start_s=10, save_s=5, restore_s=20)
    ran = simulate(asks, [200.0, 50.0], Counted(4), Preempting(), costs=costs)
    assert ran.end_s.tolist() == [100 + 60 + 35 + 110, 160]
    assert ran.preempted.tolist() == [1, 0]
    assert ran.paused_gpu_s == pytest.approx([4 * 45, 4 * 10])
    assert ran.lost_gpu_s.tolist() == [0, 0]
