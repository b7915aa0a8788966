"""Conservative backfill delays nobody, and what it plans ahead changes nothing."""

import random

import msgspec
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
from meshwright.policy.job_queue.policies.conservative_backfill import (
    AvailabilityProfile,
    ConservativeBackfillPolicy,
)
from meshwright.policy.job_queue.policies.ordered_queue import ExpectedEnds
from meshwright.policy.job_queue.sort_keys import SORT_KEYS
from meshwright.predict.job_queue import NodeFailures, simulate_queue
from tests.policy.job_queue.drawn import drawn


class PromisingAll(ConservativeBackfillPolicy):
    """Conservative backfill that notes when each job was promised to start as it arrived."""

    def __init__(self) -> None:
        super().__init__(depth=None)
        self.promised: dict[int, float] = {}

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        profile = AvailabilityProfile(now_s, pool.free, self.expected)
        for one in self.queues.iter_ordered():
            start_s = profile.find_earliest_start(one.gpus, one.remaining_s)
            self.promised.setdefault(one.index, start_s)
            profile.reserve(start_s, one.remaining_s, one.gpus)
        moves = super().decide(now_s, pool)
        for one in moves.starts:
            assert now_s <= self.promised[one.index] + 1e-6
        return moves


@pytest.mark.parametrize("seed", range(4))
def test_conservative_backfill_delays_nobody(seed: int) -> None:
    asks, run_s = drawn(seed, 100)
    ran = simulate_queue(asks, run_s, CountedPool(20), PromisingAll())
    assert np.isfinite(ran.end_s).all()


class FromScratch(ConservativeBackfillPolicy):
    """Conservative backfill that forgets what it planned."""

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        self._plan = None
        return super().decide(now_s, pool)


class Counting(ConservativeBackfillPolicy):
    """Conservative backfill that counts how often its plan still holds."""

    kept = 0

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        self.kept += self._plan is not None
        return super().decide(now_s, pool)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("what", ["exact", "estimates", "nodes", "failures", "parts", "order"])
def test_a_plan_that_is_kept_decides_as_one_made_anew(seed: int, what: str) -> None:
    draw = random.Random(seed)
    asks, run_s = drawn(seed, 150)
    depth = draw.choice((4, 20, None))
    order = (
        SORT_KEYS[draw.choice(("estimate", "size"))] if what == "order" else SORT_KEYS["arrival"]
    )
    if what == "estimates":
        asks = [
            msgspec.structs.replace(one, estimate_s=one.estimate_s * draw.choice((1.0, 0.5, 3.0)))
            for one in asks
        ]
    if what == "parts":
        asks = [msgspec.structs.replace(one, gpus=one.gpus * 0.3) for one in asks]
    failures = (
        NodeFailures(failures_per_node_day=40, repair_s=60, seed=seed)
        if what == "failures"
        else None
    )

    def ran(policy: ConservativeBackfillPolicy) -> tuple[list[float], list[float]]:
        pool = (
            CountedPool(20)
            if what not in ("nodes", "failures")
            else NodePool(make_uniform_nodes(24, 8))
        )
        found = simulate_queue(asks, run_s, pool, policy, failures=failures)
        return found.first_s.tolist(), found.end_s.tolist()

    assert ran(ConservativeBackfillPolicy(order, depth=depth)) == ran(
        FromScratch(order, depth=depth)
    )


def test_a_plan_is_kept_while_jobs_end_when_they_should() -> None:
    asks, run_s = drawn(1, 150)
    policy = Counting()
    simulate_queue(asks, run_s, CountedPool(20), policy)
    assert policy.kept > 100


def test_a_job_over_its_time_is_expected_at_any_moment() -> None:
    expected, late = (
        ExpectedEnds(),
        QueuedJob(0, JobRequest(job_id="0", submit_s=0.0, gpus=4, estimate_s=10)),
    )
    late.allocated_gpus = 4.0
    expected.add(late, 0)
    profile = AvailabilityProfile(50, 2, expected)
    assert profile.find_earliest_start(2, 100) == 50
    assert 50 < profile.find_earliest_start(6, 100) < 50.001
