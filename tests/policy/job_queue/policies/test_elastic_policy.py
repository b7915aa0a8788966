"""GPUs go where the next one is worth most; jobs shrink for others and grow into gaps."""

import pytest

from meshwright.policy.job_queue import CountedPool, JobRequest, QueuedJob
from meshwright.policy.job_queue.job import speedup
from meshwright.policy.job_queue.policies.elastic_policy import ElasticPolicy
from meshwright.predict.job_queue import simulate_queue


def elastic(job: str, submit_s: float, gpus: float, serial: float = 0.0) -> JobRequest:
    return JobRequest(
        job_id=job, submit_s=submit_s, gpus=gpus, min_gpus=1, max_gpus=8, serial_fraction=serial
    )


def test_speed_follows_amdahl() -> None:
    ask = elastic("a", 0, 4, serial=0.5)
    assert speedup(ask, 4) == 1
    assert speedup(ask, 8) == pytest.approx((0.5 + 0.5 / 4) / (0.5 + 0.5 / 8))
    assert speedup(elastic("b", 0, 4), 8) == 2


def test_a_job_alone_grows_and_shrinks_when_another_comes() -> None:
    asks = [elastic("a", 0, 4), elastic("b", 100, 4)]
    ran = simulate_queue(asks, [400.0, 400.0], CountedPool(8), ElasticPolicy(resize_cooldown_s=0))
    # Alone on 8 for 100 s (200 done), both on 4 until a ends at 300; b then has 8 again.
    assert ran.end_s.tolist() == pytest.approx([300, 400])


def test_the_job_that_scales_better_gets_more() -> None:
    queue = ElasticPolicy()
    for index, serial in enumerate((0.0, 0.3)):
        queue.on_submit(QueuedJob(index, elastic(str(index), 0, 4, serial)), 0)
    sizes = queue.choose_sizes(8)
    assert sizes[0] > sizes[1] >= 1
    assert sum(sizes.values()) == 8


def test_jobs_rest_between_changes_and_shrink_only_for_those_who_wait() -> None:
    asks = [elastic("a", 0, 4), elastic("b", 100, 4)]
    ran = simulate_queue(
        asks, [400.0, 1000.0], CountedPool(8), ElasticPolicy(resize_cooldown_s=1000)
    )
    # a shrinks for b, which may not grow for 1000 s after it started, and then has no need to.
    assert ran.end_s.tolist() == pytest.approx([300, 1100])
    assert ran.moved.tolist() == [1, 0]
