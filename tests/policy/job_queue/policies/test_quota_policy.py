"""Teams use their own, lend what they leave, and get it back when they want it."""

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.job_queue import (
    CountedPool,
    GpuPool,
    JobRequest,
    QueueDecision,
    QueuedJob,
    TeamQuota,
)
from meshwright.policy.job_queue.policies.quota_policy import QuotaPolicy
from meshwright.predict.job_queue import simulate_queue
from tests.policy.job_queue.drawn import TEAMS, drawn


def job(index: int, team: str, gpus: float) -> QueuedJob:
    return QueuedJob(index, JobRequest(job_id=str(index), submit_s=0.0, gpus=gpus, team=team))


def test_what_others_leave_is_borrowed_up_to_the_limit() -> None:
    queue = QuotaPolicy(
        {"a": TeamQuota(nominal_quota=4, borrowing_limit=2), "b": TeamQuota(nominal_quota=8)}
    )
    pool = CountedPool(12)
    for index in range(4):
        queue.on_submit(job(index, "a", 2), 0)
    assert len(queue.decide(0, pool).starts) == 3
    assert queue.used_gpus == {"a": 6, "b": 0}


def test_what_is_not_lent_is_not_borrowed() -> None:
    queue = QuotaPolicy(
        {"a": TeamQuota(nominal_quota=4), "b": TeamQuota(nominal_quota=8, lending_limit=2)}
    )
    pool = CountedPool(12)
    for index in range(4):
        queue.on_submit(job(index, "a", 2), 0)
    assert len(queue.decide(0, pool).starts) == 3


@pytest.mark.parametrize("reclaim", [True, False])
def test_owners_get_their_own_back(reclaim: bool) -> None:
    queue, pool = (
        QuotaPolicy(
            {"a": TeamQuota(nominal_quota=4), "b": TeamQuota(nominal_quota=4)}, reclaim=reclaim
        ),
        CountedPool(8),
    )
    for index in range(4):
        queue.on_submit(job(index, "a", 2), 0)
    queue.decide(0, pool)
    queue.on_submit(job(9, "b", 4), 1)
    moves = queue.decide(1, pool)
    assert [one.index for one in moves.starts] == ([9] if reclaim else [])
    assert sorted(one.index for one in moves.preemptions) == ([2, 3] if reclaim else [])


class Minding(QuotaPolicy):
    """Quotas that fail where a team waits for its own while another borrows."""

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        moves = super().decide(now_s, pool)
        borrowed = any(
            self.used_gpus[team] > quota.nominal_quota for team, quota in self.quotas.items()
        )
        for one in self.waiting.values():
            own = self.quotas[one.request.team].nominal_quota - self.used_gpus[one.request.team]
            assert not (borrowed and one.gpus <= own)
        return moves


@pytest.mark.parametrize("seed", range(4))
def test_nobody_waits_for_its_own_while_others_borrow(seed: int) -> None:
    asks, run_s = drawn(seed, 100, most=8)
    ran = simulate_queue(
        asks, run_s, CountedPool(24), Minding({team: TeamQuota(nominal_quota=8) for team in TEAMS})
    )
    assert np.isfinite(ran.end_s).all()


def test_a_team_without_quota_is_named() -> None:
    with pytest.raises(InputError, match="team 'c' has no quota"):
        QuotaPolicy({"a": TeamQuota(nominal_quota=4)}).on_submit(job(0, "c", 1), 0)
