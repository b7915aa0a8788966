"""Teams come to their shares, and usage fades."""

import pytest

from meshwright.policy.job_queue import CountedPool, JobRequest
from meshwright.policy.job_queue.policies.multifactor import (
    MultifactorPolicy,
    PriorityWeights,
    TeamUsage,
)
from meshwright.predict.job_queue import simulate_queue


def test_usage_halves_in_its_half_life_and_grows_while_gpus_are_held() -> None:
    usage = TeamUsage(half_life_s=100)
    usage.add_gpus("a", 2, 0)
    usage.add_gpus("a", -2, 50)
    first = usage.used_gpu_s["a"]
    assert 0 < first < 100
    usage.decay_to(150)
    assert usage.used_gpu_s["a"] == pytest.approx(first / 2)


@pytest.mark.parametrize("shares", [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0}])
def test_shares_converge_where_both_teams_want_everything(shares: dict[str, float]) -> None:
    asks, run_s = [], []
    for at in range(1600):
        # Both ask for all GPUs all the time, one in many short jobs, one in fewer long ones.
        team = "a" if at % 3 else "b"
        lasts_s = 60.0 if team == "a" else 120.0
        asks.append(
            JobRequest(job_id=str(at), submit_s=0.0, gpus=1.0, estimate_s=lasts_s, team=team)
        )
        run_s.append(lasts_s)
    weights = PriorityWeights(age=0.0, decay_half_life_s=5_000.0, calc_period_s=30.0)
    ran = simulate_queue(asks, run_s, CountedPool(16), MultifactorPolicy(shares, weights))
    until_s = 2000.0  # long before either has nothing left to do
    used = {"a": 0.0, "b": 0.0}
    for ask, first_s, end_s in zip(ran.requests, ran.first_s, ran.end_s, strict=True):
        used[ask.team] += max(0.0, min(end_s, until_s) - min(first_s, until_s))
    assert used["a"] / used["b"] == pytest.approx(shares["a"] / shares["b"], rel=0.1)


def test_waiting_counts_in_the_end() -> None:
    queue = MultifactorPolicy(
        weights=PriorityWeights(age=1000, fair_share=0, priority=10, max_age_s=100, calc_period_s=1)
    )
    asks = [
        JobRequest(job_id="running", submit_s=0, gpus=1, estimate_s=90),
        JobRequest(job_id="old", submit_s=1, gpus=1, estimate_s=1),
        JobRequest(job_id="important", submit_s=80, gpus=1, estimate_s=1, priority=1),
    ]
    ran = simulate_queue(asks, [90.0, 1.0, 1.0], CountedPool(1), queue)
    assert ran.first_s.tolist() == [0, 90, 91]
