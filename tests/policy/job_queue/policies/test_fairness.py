"""Who made least progress goes first; unlike GPUs go to those who gain most by them."""

import pytest

from meshwright.policy.job_queue import CountedPool, JobRequest, NodePool, NodeSpec
from meshwright.policy.job_queue.policies.fairness import MaxMinFairnessPolicy
from meshwright.predict.job_queue import simulate_queue


def test_kinds_go_to_those_who_gain_most_and_progress_stays_even() -> None:
    nodes = [NodeSpec(gpus=4, gpu_kind="old"), NodeSpec(gpus=4, gpu_kind="new")]
    asks = [
        JobRequest(job_id="gains", submit_s=0, gpus=4, speed_by_gpu_kind={"old": 1.0, "new": 4.0}),
        JobRequest(job_id="same", submit_s=0, gpus=4, speed_by_gpu_kind={"old": 1.0, "new": 1.0}),
    ]
    ran = simulate_queue(asks, [4000.0, 1000.0], NodePool(nodes), MaxMinFairnessPolicy(round_s=100))
    # Each is alone on the kind that suits it best: 4000 s of work at four times the speed.
    assert ran.end_s.tolist() == pytest.approx([1000, 1000])


@pytest.mark.parametrize("count", [3, 5])
def test_equal_jobs_take_turns(count: int) -> None:
    asks = [JobRequest(job_id=str(at), submit_s=0, gpus=1) for at in range(count)]
    ran = simulate_queue(asks, [1000.0] * count, CountedPool(1), MaxMinFairnessPolicy(round_s=10))
    assert ran.end_s.min() > 1000 * (count - 1)
