"""Whatever the policy and the placement: no GPU is given twice, gangs are whole, all jobs end."""

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.queue import (
    PLACINGS,
    POLICIES,
    Counted,
    Nodes,
    Quota,
    Settings,
    even_nodes,
    make_policy,
)
from meshwright.predict.queue import Costs, Failures, simulate
from tests.policy.queue.drawn import TEAMS, Watched, drawn

SETTINGS = Settings(
    shares={"red": 2.0},
    quotas={team: Quota(gpus=8.0) for team in TEAMS},
    past_gpu_s=[10.0, 50.0, 300.0, 2000.0],
    limits_gpu_s=(100.0, 1000.0),
)
SPLITTING = [name for name in PLACINGS if name != "consolidate"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_counted_gpus_are_given_once_and_every_job_ends(name: str, seed: int) -> None:
    asks, run_s = drawn(seed, 80, elastic=name == "elastic")
    watched = Watched(make_policy(name, SETTINGS))
    ran = simulate(asks, run_s, Counted(24), watched)
    assert np.isfinite(ran.end_s).all()
    assert (ran.first_s >= ran.submit_s).all()
    if name != "elastic":
        assert (ran.end_s - ran.first_s >= np.array(run_s) - 1e-6).all()
        assert ran.served_gpu_s == pytest.approx(ran.run_s * ran.gpus)
    held = ran.sums.capacity_gpu_s - ran.sums.free_gpu_s
    assert held == pytest.approx(ran.served_gpu_s.sum())


@pytest.mark.parametrize("name", POLICIES)
def test_gpus_of_nodes_are_given_once_even_where_nodes_fail(name: str) -> None:
    asks, run_s = drawn(3, 60, elastic=name == "elastic")
    watched = Watched(make_policy(name, SETTINGS))
    pool = Nodes(even_nodes(32, 8, per_domain=2), "best-fit")
    ran = simulate(
        asks, run_s, pool, watched,
        costs=Costs(start_s=1, save_s=2, restore_s=3, saved_every_s=60),
        failures=Failures(per_node_day=90, repair_s=300, seed=1),
    )  # fmt: skip
    assert np.isfinite(ran.end_s).all()
    assert ran.failed.sum() > 0
    useful = ran.served_gpu_s - ran.paused_gpu_s - ran.lost_gpu_s
    if name != "elastic":  # whose GPU-seconds depend on the sizes it had
        assert useful == pytest.approx(ran.run_s * ran.gpus)


@pytest.mark.parametrize("placing", PLACINGS)
@pytest.mark.parametrize("name", ["fifo", "easy", "srsf", "priority"])
def test_every_placement_gives_whole_gangs(placing: str, name: str) -> None:
    asks, run_s = drawn(4, 60)
    watched = Watched(make_policy(name, SETTINGS))
    ran = simulate(asks, run_s, Nodes(even_nodes(32, 8, per_domain=2), placing), watched)
    assert np.isfinite(ran.end_s).all()


def test_unknown_policies_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="srtf"):
        make_policy("srft")


def test_jobs_that_can_never_run_are_named() -> None:
    asks, run_s = drawn(1, 5)
    with pytest.raises(InputError, match=r"asks for .* GPUs and there are 1"):
        simulate(asks, run_s, Counted(1), make_policy("fifo"))
