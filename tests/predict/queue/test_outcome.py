"""Figures of a queue, worked out by hand."""

import numpy as np
import pytest

from meshwright.policy.queue import Ask, Counted
from meshwright.policy.queue.ordered import Strict
from meshwright.predict.queue import outcome_of, simulate
from meshwright.predict.queue.outcome import spread


def test_percentiles_are_figures_that_occurred() -> None:
    found = spread(np.arange(1.0, 101.0))
    assert (found.p50, found.p95, found.p99, found.most) == (51, 96, 100, 100)
    assert found.mean == 50.5


def test_one_queue_worked_out_by_hand() -> None:
    asks = [
        Ask(job="a", submit_s=0, gpus=2, team="x", deadline_s=100),
        Ask(job="b", submit_s=0, gpus=4, team="y", deadline_s=100),
        Ask(job="c", submit_s=50, gpus=1, team="x"),
    ]
    found = outcome_of(simulate(asks, [100.0, 100.0, 50.0], Counted(4), Strict()))
    assert found.makespan_s == 250
    assert found.jct_s.mean == pytest.approx((100 + 200 + 200) / 3)
    assert found.wait_s.mean == pytest.approx((0 + 100 + 150) / 3)
    assert found.allocation == pytest.approx(650 / 1000)
    assert found.pending_idle == pytest.approx(100 / 250)
    assert found.pending_idle_gpu_hours == pytest.approx(200 / 3600)
    assert (found.deadlines, found.missed) == (2, 1)
    assert [(one.gpus, one.jobs) for one in found.by_size] == [("1", 1), ("2-4", 2)]
    # Team x: its jobs ran for all and for a quarter of their time; team y for half.
    means = np.array([(1 + 0.25) / 2, 0.5])
    assert found.fairness.jain == pytest.approx(means.sum() ** 2 / (2 * (means**2).sum()))


def test_even_service_has_a_jain_index_of_one() -> None:
    asks = [Ask(job=str(at), submit_s=at * 100.0, gpus=1, user=str(at)) for at in range(4)]
    found = outcome_of(simulate(asks, [10.0] * 4, Counted(1), Strict()))
    assert found.fairness.jain == pytest.approx(1)
    assert found.fairness.unfair == 0
