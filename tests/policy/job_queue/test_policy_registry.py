"""Whatever the policy and the placement: no GPU is given twice, gangs are whole, all jobs end."""

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.job_queue import (
    PLACEMENT_POLICIES,
    POLICIES,
    CountedPool,
    NodePool,
    QueueConfig,
    TeamQuota,
    make_policy,
    make_uniform_nodes,
)
from meshwright.predict.job_queue import NodeFailures, PreemptionCosts, simulate_queue
from tests.policy.job_queue.drawn import TEAMS, Watched, drawn

SETTINGS = QueueConfig(
    team_shares={"red": 2.0},
    team_quotas={team: TeamQuota(nominal_quota=8.0) for team in TEAMS},
    past_service_gpu_s=[10.0, 50.0, 300.0, 2000.0],
    queue_thresholds_gpu_s=(100.0, 1000.0),
)
SPLITTING = [name for name in PLACEMENT_POLICIES if name != "consolidate"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_counted_gpus_are_given_once_and_every_job_ends(name: str, seed: int) -> None:
    asks, run_s = drawn(seed, 80, elastic=name == "elastic")
    watched = Watched(make_policy(name, SETTINGS))
    ran = simulate_queue(asks, run_s, CountedPool(24), watched)
    assert np.isfinite(ran.end_s).all()
    assert (ran.first_s >= ran.submit_s).all()
    if name != "elastic":
        assert (ran.end_s - ran.first_s >= np.array(run_s) - 1e-6).all()
        assert ran.served_gpu_s == pytest.approx(ran.durations_s * ran.gpus)
    held = ran.totals.capacity_gpu_s - ran.totals.free_gpu_s
    assert held == pytest.approx(ran.served_gpu_s.sum())


@pytest.mark.parametrize("name", POLICIES)
def test_gpus_of_nodes_are_given_once_even_where_nodes_fail(name: str) -> None:
    asks, run_s = drawn(3, 60, elastic=name == "elastic")
    watched = Watched(make_policy(name, SETTINGS))
    pool = NodePool(make_uniform_nodes(32, 8, per_domain=2), "best-fit")
    ran = simulate_queue(
        asks, run_s, pool, watched,
        costs=PreemptionCosts(startup_s=1, checkpoint_s=2, restore_s=3, checkpoint_interval_s=60),
        failures=NodeFailures(failures_per_node_day=90, repair_s=300, seed=1),
    )  # fmt: skip
    assert np.isfinite(ran.end_s).all()
    assert ran.failed.sum() > 0
    useful = ran.served_gpu_s - ran.paused_gpu_s - ran.lost_gpu_s
    if name != "elastic":  # whose GPU-seconds depend on the sizes it had
        assert useful == pytest.approx(ran.durations_s * ran.gpus)


@pytest.mark.parametrize("placing", PLACEMENT_POLICIES)
@pytest.mark.parametrize("name", ["fifo", "easy", "srsf", "priority"])
def test_every_placement_gives_whole_gangs(placing: str, name: str) -> None:
    asks, run_s = drawn(4, 60)
    watched = Watched(make_policy(name, SETTINGS))
    ran = simulate_queue(
        asks, run_s, NodePool(make_uniform_nodes(32, 8, per_domain=2), placing), watched
    )
    assert np.isfinite(ran.end_s).all()


def test_unknown_policies_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="srtf"):
        make_policy("srft")


def test_jobs_that_can_never_run_are_named() -> None:
    asks, run_s = drawn(1, 5)
    with pytest.raises(InputError, match=r"asks for .* GPUs and there are 1"):
        simulate_queue(asks, run_s, CountedPool(1), make_policy("fifo"))
