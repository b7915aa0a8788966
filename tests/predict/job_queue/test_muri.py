"""Muri's traces: equal to an independent replay, and to what Muri's own simulator makes of them."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshwright.policy.job_queue import (
    CountedPool,
    GpuPool,
    JobRequest,
    NodePool,
    QueuePolicy,
    make_policy,
    make_uniform_nodes,
)
from meshwright.policy.job_queue.policies.ordered_queue import StrictOrderPolicy
from meshwright.policy.job_queue.policies.preemptive_order import PreemptiveOrderPolicy
from meshwright.policy.job_queue.sort_keys import (
    by_estimate,
    by_remaining_service,
    by_remaining_time,
)
from meshwright.predict.job_queue import (
    PreemptionCosts,
    QueueOutcome,
    simulate_queue,
    summarize_run,
)

# Seconds that Muri's simulator takes from every running job at each decision, by GPUs and model;
# models that it does not name lose 10.
RESTART_S = {
    1: {"vgg16": 7, "vgg19": 7, "resnet18": 4, "shufflenet_v2_x1_0": 4, "a2c": 38, "dqn": 5},
    2: {"vgg16": 7, "vgg19": 7, "resnet18": 5, "shufflenet_v2_x1_0": 4, "a2c": 39, "dqn": 5},
    4: {"vgg16": 8, "vgg19": 8, "resnet18": 5, "shufflenet_v2_x1_0": 5, "a2c": 39, "dqn": 6},
    8: {"vgg16": 9, "vgg19": 9, "resnet18": 7, "shufflenet_v2_x1_0": 5, "a2c": 46, "dqn": 6},
    16: {"vgg16": 9, "vgg19": 10, "resnet18": 7, "shufflenet_v2_x1_0": 7, "a2c": 46, "dqn": 8},
    32: {"vgg16": 10, "vgg19": 10, "resnet18": 7, "shufflenet_v2_x1_0": 8, "a2c": 46, "dqn": 8},
}
STRETCH = 1.015  # of every iteration, in Muri's simulator


class Jobs(NamedTuple):
    asks: list[JobRequest]
    run_s: list[float]


def read(shared: Path, trace: int, *, as_upstream: bool = False) -> Jobs:
    path = shared / "fleet_traces" / "muri" / f"sim_trace{trace}.csv.gz"
    if not path.exists():
        pytest.skip("needs Muri's traces in the shared data folder")
    asks, run_s = [], []
    with gzip.open(path, "rt") as lines:
        for row in csv.DictReader(lines):
            gpus, lasts_s, restart_s = int(row["num_gpu"]), int(row["duration"]) / 1000, 0
            if as_upstream:
                lasts_s = int(row["iterations"]) * float(row["iteration_time"]) * STRETCH / 1000
                restart_s = RESTART_S[gpus].get(row["model_name"], 10)
            submit_s = int(row["submit_time"]) / 1000
            asks.append(
                JobRequest(
                    job_id=row["job_id"], submit_s=submit_s, gpus=gpus, estimate_s=lasts_s,
                    restart_cost_s=restart_s,
                )
            )  # fmt: skip
            run_s.append(lasts_s)
    return Jobs(asks, run_s)


def published(shared: Path, group: str, trace: int, name: str) -> dict[str, Any]:
    text = (shared / "fleet_traces" / "muri" / "reference_results.json").read_text()
    found: dict[str, Any] = json.loads(text)[group][f"trace{trace}"][name]
    return found


POLICIES: dict[str, Callable[[], QueuePolicy]] = {
    "fifo_hol": lambda: make_policy("fifo"),
    "fifo_skip": lambda: make_policy("fifo-greedy"),
    "sjf_hol": lambda: StrictOrderPolicy(by_estimate),
    "sjf_skip": lambda: make_policy("sjf"),
    "ssf_skip": lambda: make_policy("ssf"),
    "srtf_preempt": lambda: make_policy("srtf"),
    "srsf_preempt": lambda: make_policy("srsf"),
}
LONG = [pytest.param(2, name, marks=pytest.mark.slow) for name in ("srtf_preempt", "srsf_preempt")]
CASES = [(trace, name) for trace in (1, 3, 4) for name in POLICIES]
CASES += [(2, name) for name in POLICIES if "preempt" not in name]


@pytest.mark.parametrize(("trace", "name"), [*CASES, *LONG])
def test_every_figure_equals_the_independent_replay(shared: Path, trace: int, name: str) -> None:
    jobs = read(shared, trace)
    found = summarize_run(simulate_queue(*jobs, CountedPool(64), POLICIES[name]()))
    said = published(shared, "ours", trace, name)
    figures = {
        "jobs": found.jobs,
        "avg_jct_s": round(found.jct_s.mean, 1),
        "p50_jct_s": found.jct_s.p50,
        "p99_jct_s": found.jct_s.p99,
        "makespan_s": found.makespan_s,
        "avg_wait_s": round(found.wait_s.mean, 1),
    }
    assert {key: figures[key] for key in said} == pytest.approx(said, abs=1e-6)


def upstream(shared: Path, trace: int, pool: GpuPool, policy: QueuePolicy) -> QueueOutcome:
    jobs = read(shared, trace, as_upstream=True)
    return summarize_run(
        simulate_queue(*jobs, pool, policy, costs=PreemptionCosts(restart_every_round=True))
    )


@pytest.mark.parametrize(
    "trace", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("name", "order"), [("shortest", by_remaining_time), ("shortest-gpu", by_remaining_service)]
)
def test_remaining_time_and_service_are_those_of_muris_simulator(
    shared: Path, trace: int, name: str, order: Any
) -> None:
    said = published(shared, "upstream_muri_simulator", trace, name)
    # All is placed anew at each decision, on one node or on empty ones.
    pool = NodePool(make_uniform_nodes(64, 8), "consolidate")
    found = upstream(shared, trace, pool, PreemptiveOrderPolicy(order, moving=True))
    assert found.jct_s.mean == pytest.approx(said["avg_jct_s"], rel=1e-6)
    assert found.makespan_s == pytest.approx(said["makespan_s"], rel=1e-6)
    assert found.jct_s.p99 == pytest.approx(said["p99_jct_s"], rel=1e-6)


@pytest.mark.parametrize(
    "trace", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_least_attained_service_is_near_that_of_muris_simulator(shared: Path, trace: int) -> None:
    said = published(shared, "upstream_muri_simulator", trace, "dlas-gpu")
    found = upstream(shared, trace, CountedPool(64), make_policy("las"))
    # Upstream lets a job sink by one queue at a decision, ours by as many as it has earned.
    assert found.jct_s.mean == pytest.approx(said["avg_jct_s"], rel=2e-3)
    assert found.makespan_s == pytest.approx(said["makespan_s"], rel=2e-3)
