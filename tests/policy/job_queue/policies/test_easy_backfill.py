"""Backfill fills gaps, and never at the cost of those who have a reservation."""

import math

import numpy as np
import pytest

from meshwright.policy.job_queue import (
    CountedPool,
    GpuPool,
    JobRequest,
    NodePool,
    QueueDecision,
    QueuedJob,
    make_uniform_nodes,
)
from meshwright.policy.job_queue.policies.easy_backfill import EasyBackfillPolicy, Reservation
from meshwright.predict.job_queue import simulate_queue
from tests.policy.job_queue.drawn import drawn


def job(index: int, gpus: float, estimate_s: float, submit_s: float = 0.0) -> QueuedJob:
    return QueuedJob(
        index, JobRequest(job_id=str(index), submit_s=submit_s, gpus=gpus, estimate_s=estimate_s)
    )


def test_a_short_job_fills_the_gap_and_a_long_one_does_not() -> None:
    queue, pool = EasyBackfillPolicy(), CountedPool(8)
    for one in (job(0, 6, 100), job(1, 8, 10), job(2, 2, 101), job(3, 2, 100)):
        queue.on_submit(one, 0)
    assert [one.index for one in queue.decide(0, pool).starts] == [0, 3]


def test_a_long_job_may_pass_where_there_is_room_beside_the_head() -> None:
    queue, pool = EasyBackfillPolicy(), CountedPool(8)
    for one in (job(0, 6, 100), job(1, 5, 10), job(2, 2, 1000), job(3, 2, 1000)):
        queue.on_submit(one, 0)
    # When the head starts, 3 are left beside it: enough for one of the two.
    assert [one.index for one in queue.decide(0, pool).starts] == [0, 2]


class Promising(EasyBackfillPolicy):
    """EASY that notes when its head was promised to start, the first time it was the head."""

    def __init__(self) -> None:
        super().__init__()
        self.promised: dict[int, float] = {}
        self.kept = 0

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        moves = super().decide(now_s, pool)
        for one in moves.starts:
            if one.index in self.promised:
                assert now_s <= self.promised[one.index] + 1e-6
                self.kept += 1
        if (lane := self.queues.find_first_fitting(math.inf)) is not None:
            head = lane.get((0, 0))[2]
            if head.index not in self.promised:
                self.promised[head.index] = Reservation(head, self.expected, pool).start_s
        return moves


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pool", ["counted", "consolidate", "best-fit"])
def test_easy_never_delays_the_reservation(seed: int, pool: str) -> None:
    asks, run_s = drawn(seed, 150)
    queue = Promising()
    gpus = CountedPool(24) if pool == "counted" else NodePool(make_uniform_nodes(24, 8), pool)
    ran = simulate_queue(asks, run_s, gpus, queue)
    assert np.isfinite(ran.end_s).all()
    assert queue.kept > 5


@pytest.mark.parametrize("seed", range(3))
def test_backfill_waits_less_than_a_strict_queue(seed: int) -> None:
    from meshwright.policy.job_queue.policies.ordered_queue import StrictOrderPolicy

    asks, run_s = drawn(seed, 200)
    strict = simulate_queue(asks, run_s, CountedPool(20), StrictOrderPolicy())
    easy = simulate_queue(asks, run_s, CountedPool(20), EasyBackfillPolicy())
    assert (easy.end_s - easy.submit_s).mean() < (strict.end_s - strict.submit_s).mean()
