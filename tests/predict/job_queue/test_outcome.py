"""Figures of a queue, worked out by hand."""

import numpy as np
import pytest

from meshwright.policy.job_queue import CountedPool, JobRequest
from meshwright.policy.job_queue.policies.ordered_queue import StrictOrderPolicy
from meshwright.predict.job_queue import simulate_queue, summarize_run
from meshwright.predict.job_queue.outcome import compute_percentiles


def test_percentiles_are_figures_that_occurred() -> None:
    found = compute_percentiles(np.arange(1.0, 101.0))
    assert (found.p50, found.p95, found.p99, found.max) == (51, 96, 100, 100)
    assert found.mean == 50.5


def test_one_queue_worked_out_by_hand() -> None:
    asks = [
        JobRequest(job_id="a", submit_s=0, gpus=2, team="x", deadline_s=100),
        JobRequest(job_id="b", submit_s=0, gpus=4, team="y", deadline_s=100),
        JobRequest(job_id="c", submit_s=50, gpus=1, team="x"),
    ]
    found = summarize_run(
        simulate_queue(asks, [100.0, 100.0, 50.0], CountedPool(4), StrictOrderPolicy())
    )
    assert found.makespan_s == 250
    assert found.jct_s.mean == pytest.approx((100 + 200 + 200) / 3)
    assert found.wait_s.mean == pytest.approx((0 + 100 + 150) / 3)
    assert found.allocated_fraction == pytest.approx(650 / 1000)
    assert found.pending_while_idle_fraction == pytest.approx(100 / 250)
    assert found.pending_idle_gpu_hours == pytest.approx(200 / 3600)
    assert (found.jobs_with_deadline, found.missed_deadlines) == (2, 1)
    assert [(one.gpus, one.jobs) for one in found.by_size] == [("1", 1), ("2-4", 2)]
    # Team x: its jobs ran for all and for a quarter of their time; team y for half.
    means = np.array([(1 + 0.25) / 2, 0.5])
    assert found.fairness.jain_index == pytest.approx(means.sum() ** 2 / (2 * (means**2).sum()))


def test_even_service_has_a_jain_index_of_one() -> None:
    asks = [
        JobRequest(job_id=str(at), submit_s=at * 100.0, gpus=1, user=str(at)) for at in range(4)
    ]
    found = summarize_run(simulate_queue(asks, [10.0] * 4, CountedPool(1), StrictOrderPolicy()))
    assert found.fairness.jain_index == pytest.approx(1)
    assert found.fairness.unfair_fraction == 0
