"""The clock: what happens at one moment is one decision, and every second is accounted for."""

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.job_queue import (
    CountedPool,
    GpuPool,
    JobRequest,
    NodePool,
    QueueDecision,
    make_policy,
    make_uniform_nodes,
)
from meshwright.policy.job_queue.policies.ordered_queue import GreedyOrderPolicy, StrictOrderPolicy
from meshwright.predict.job_queue import (
    NodeDrain,
    NodeFailures,
    PreemptionCosts,
    simulate_queue,
    summarize_run,
)
from tests.policy.job_queue.drawn import drawn


def ask(job: str, submit_s: float, gpus: float, **more: float) -> JobRequest:
    return JobRequest(job_id=job, submit_s=submit_s, gpus=gpus, **more)  # type: ignore[arg-type]


class Counting(StrictOrderPolicy):
    """A queue that counts how often it is asked."""

    asked = 0

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        self.asked += 1
        return super().decide(now_s, pool)


def test_what_happens_at_the_same_moment_is_one_decision() -> None:
    queue = Counting()
    asks = [ask("a", 0, 2), ask("b", 0, 2), ask("c", 10, 4), ask("d", 10, 1)]
    ran = simulate_queue(asks, [10.0, 10.0, 5.0, 5.0], CountedPool(5), queue)
    assert queue.asked == 3  # at 0, 10 and 15
    assert ran.first_s.tolist() == [0, 0, 10, 10]


def test_columns_come_back_in_the_order_that_was_given() -> None:
    asks = [ask("late", 100, 1), ask("early", 0, 1), ask("middle", 50, 1)]
    ran = simulate_queue(asks, [1.0, 2.0, 3.0], CountedPool(1), StrictOrderPolicy())
    assert ran.end_s.tolist() == [101, 2, 53]
    assert [one.job_id for one in ran.requests] == ["late", "early", "middle"]
    assert ran.durations_s.tolist() == [1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_sums_over_time_close(seed: int) -> None:
    asks, run_s = drawn(seed, 100)
    ran = simulate_queue(asks, run_s, CountedPool(20), GreedyOrderPolicy())
    found, sums = summarize_run(ran), ran.totals
    assert sums.capacity_gpu_s == pytest.approx(20 * found.makespan_s)
    assert found.allocated_fraction == pytest.approx(ran.served_gpu_s.sum() / sums.capacity_gpu_s)
    assert sums.pending_job_s == pytest.approx((ran.first_s - ran.submit_s).sum())
    assert found.goodput == pytest.approx(1)


def test_a_failure_takes_what_no_checkpoint_has() -> None:
    failures = NodeFailures(failures_per_node_day=5, repair_s=600, seed=3)
    asks = [ask(str(at), 0, 8) for at in range(4)]
    for every_s in (None, 1000.0):
        pool = NodePool(make_uniform_nodes(32, 8))
        ran = simulate_queue(
            asks, [30_000.0] * 4, pool, StrictOrderPolicy(), failures=failures,
            costs=PreemptionCosts(checkpoint_interval_s=every_s, restore_s=60),
        )  # fmt: skip
        lost = ran.lost_gpu_s / 8
        assert ran.failed.sum() >= 3
        useful = ran.served_gpu_s - ran.lost_gpu_s - ran.paused_gpu_s
        assert useful == pytest.approx(ran.durations_s * 8)
        if every_s is not None:
            assert (lost <= ran.failed * every_s).all()
            assert summarize_run(ran).goodput > 0.9
        else:
            assert lost.sum() > 4000


def test_failures_come_at_their_rate() -> None:
    failures = NodeFailures(failures_per_node_day=0.5, repair_s=1, seed=0)
    pool = NodePool(make_uniform_nodes(800, 8))
    ran = simulate_queue(
        [ask("all", 0, 800)], [86400.0 * 2], pool, StrictOrderPolicy(), failures=failures,
        costs=PreemptionCosts(checkpoint_interval_s=1.0),
    )  # fmt: skip
    # A hundred nodes over two days at half a failure a day each, with some more for what is redone.
    assert 80 <= ran.failed[0] <= 130


def test_a_drained_node_takes_no_jobs_and_finishes_those_it_has() -> None:
    drains = [NodeDrain(node=0, since_s=10, until_s=1000)]
    asks = [ask("a", 0, 8), ask("b", 20, 8), ask("c", 30, 8)]
    ran = simulate_queue(
        asks, [100.0] * 3, NodePool(make_uniform_nodes(16, 8)), StrictOrderPolicy(), drains=drains
    )
    assert ran.end_s.tolist() == [100, 120, 220]


def test_nodes_are_needed_for_failures() -> None:
    with pytest.raises(InputError, match="say how many GPUs a node has"):
        simulate_queue(
            [ask("a", 0, 1)],
            [1.0],
            CountedPool(1),
            StrictOrderPolicy(),
            failures=NodeFailures(failures_per_node_day=1),
        )


def test_jobs_that_no_placement_can_place_are_told() -> None:
    pool = NodePool(make_uniform_nodes(16, 8, kind="a100"), "consolidate")
    asks = [JobRequest(job_id="a", submit_s=0, gpus=4, gpu_kinds=("h100",))]
    with pytest.raises(InputError, match="1 jobs wait for GPUs that never come free together"):
        simulate_queue(asks, [1.0], pool, make_policy("fifo"))


def test_no_jobs_are_no_trouble() -> None:
    found = summarize_run(simulate_queue([], [], CountedPool(4), StrictOrderPolicy()))
    assert (found.jobs, found.makespan_s, found.jct_s.mean) == (0, 0, 0)
    assert np.isfinite(found.allocated_fraction)


def test_decisions_that_restart_everything_cost_each_job_its_own() -> None:
    asks = [ask("a", 0, 1, restart_cost_s=10), ask("b", 100, 1, restart_cost_s=5)]
    ran = simulate_queue(
        asks,
        [200.0, 20.0],
        CountedPool(2),
        StrictOrderPolicy(),
        costs=PreemptionCosts(restart_every_round=True),
    )
    # a is restarted when b comes and when b ends; nothing restarts b.
    assert ran.end_s.tolist() == [220, 120]
