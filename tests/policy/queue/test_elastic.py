"""GPUs go where the next one is worth most; jobs shrink for others and grow into gaps."""

import pytest

from meshwright.policy.queue import Ask, Counted, Standing
from meshwright.policy.queue.ask import speedup
from meshwright.policy.queue.elastic import Elastic
from meshwright.predict.queue import simulate


def elastic(job: str, submit_s: float, gpus: float, serial: float = 0.0) -> Ask:
    return Ask(
        job=job, submit_s=submit_s, gpus=gpus, least_gpus=1, most_gpus=8, serial_share=serial
    )


def test_speed_follows_amdahl() -> None:
    ask = elastic("a", 0, 4, serial=0.5)
    assert speedup(ask, 4) == 1
    assert speedup(ask, 8) == pytest.approx((0.5 + 0.5 / 4) / (0.5 + 0.5 / 8))
    assert speedup(elastic("b", 0, 4), 8) == 2


def test_a_job_alone_grows_and_shrinks_when_another_comes() -> None:
    asks = [elastic("a", 0, 4), elastic("b", 100, 4)]
    ran = simulate(asks, [400.0, 400.0], Counted(8), Elastic(rest_s=0))
    # Alone on 8 for 100 s (200 done), both on 4 until a ends at 300; b then has 8 again.
    assert ran.end_s.tolist() == pytest.approx([300, 400])


def test_the_job_that_scales_better_gets_more() -> None:
    queue = Elastic()
    for index, serial in enumerate((0.0, 0.3)):
        queue.arrives(Standing(index, elastic(str(index), 0, 4, serial)), 0)
    sizes = queue.sizes(8)
    assert sizes[0] > sizes[1] >= 1
    assert sum(sizes.values()) == 8


def test_jobs_rest_between_changes_and_shrink_only_for_those_who_wait() -> None:
    asks = [elastic("a", 0, 4), elastic("b", 100, 4)]
    ran = simulate(asks, [400.0, 1000.0], Counted(8), Elastic(rest_s=1000))
    # a shrinks for b, which may not grow for 1000 s after it started, and then has no need to.
    assert ran.end_s.tolist() == pytest.approx([300, 1100])
    assert ran.moved.tolist() == [1, 0]
