"""Figures of a run: latencies as load generators define them, goodput, occupancy, cost."""

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.sim.serving_fleet import (
    ReplicaPool,
    ServingFleet,
    build_kv_transfer_time,
    count_kv_blocks,
    default_scheduler_config,
    simulate_fleet,
)
from meshwright.predict.serving.sim.serving_metrics import (
    ServingMetrics,
    compute_serving_metrics,
    weighted_latency_stats,
)
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.workload import WorkloadRequest

MODEL, CLUSTER = catalog.get_model("llama3.1-8b"), catalog.get_cluster("h200-superpod").with_gpus(8)
REPLICA = Replica(model=MODEL, cluster=CLUSTER)
REQUESTS = [
    WorkloadRequest(arrival_s=number / 20, prompt_tokens=500 + number % 7, output_tokens=50)
    for number in range(200)
]


def fleet(count: int = 1, apart: int = 0) -> ServingFleet:
    copies = ReplicaPool(
        replica=REPLICA, scheduler_config=default_scheduler_config(REPLICA), count=count
    )
    before = (
        ReplicaPool(
            replica=REPLICA, scheduler_config=default_scheduler_config(REPLICA), count=apart
        )
        if apart
        else None
    )
    return ServingFleet(serving_pool=copies, prefill_pool=before)


def figures(of: ServingFleet, **objective: float) -> ServingMetrics:
    return compute_serving_metrics(simulate_fleet(of, REQUESTS), of, objective or None)


def test_throughput_and_cost_follow_from_the_columns() -> None:
    found = figures(fleet())
    assert found.requests == 200
    assert found.output_tokens_per_s == pytest.approx(200 * 50 / found.seconds)
    price = CLUSTER.price_per_gpu_hour
    assert price is not None
    dollars = price * found.seconds / 3600
    assert found.dollars_per_million_tokens == pytest.approx(dollars / (200 * 50) * 1e6)
    assert found.joules_per_token is not None
    assert 0 < found.engine_utilization <= 1
    assert 0 < found.mean_kv_usage <= found.max_kv_usage < 1


def test_two_engines_are_less_busy_than_one_and_cost_more() -> None:
    one, two = figures(fleet()), figures(fleet(2))
    assert two.engine_utilization < one.engine_utilization
    assert two.mean_decode_batch < one.mean_decode_batch
    assert one.dollars_per_million_tokens is not None
    assert two.dollars_per_million_tokens is not None
    assert two.dollars_per_million_tokens > one.dollars_per_million_tokens


def test_goodput_counts_requests_that_keep_to_every_part() -> None:
    loose = figures(fleet(), ttft=10.0, itl=1.0, tpot=1.0, e2e=100.0)
    assert loose.slo_attainment == 1.0
    assert loose.goodput_requests_per_s == pytest.approx(loose.requests_per_s)
    middle = loose.latency["ttft"].p50_s
    half = figures(fleet(), ttft=middle)
    assert half.slo_attainment == pytest.approx(0.5, abs=0.01)
    assert half.slo_violations is not None
    assert half.slo_violations["ttft"] == pytest.approx(1 - (half.slo_attainment or 0))
    none = figures(fleet(), ttft=middle, e2e=0.0)
    assert none.slo_attainment == 0.0


def test_without_an_objective_there_is_no_goodput() -> None:
    assert figures(fleet()).slo_attainment is None


def test_itl_holds_for_all_but_one_in_a_hundred_of_a_requests_own_gaps() -> None:
    found = figures(fleet())
    step = found.latency["itl"].p50_s
    assert figures(fleet(), itl=step * 20).slo_attainment == 1.0
    assert figures(fleet(), itl=step * 0.5).slo_attainment == 0.0


def test_prompts_apart_leave_steady_gaps() -> None:
    mixed, apart = figures(fleet(2)), figures(fleet(1, apart=1))
    assert apart.latency["itl"].p99_s < mixed.latency["itl"].p99_s
    assert apart.gpus == mixed.gpus == 2


def test_weighted_percentiles_are_those_of_all_values() -> None:
    values, counts = np.array([3.0, 1.0, 2.0]), np.array([1.0, 98.0, 1.0])
    found = weighted_latency_stats(values, counts)
    assert found is not None
    assert (found.p50_s, found.p95_s, found.p99_s, found.max_s) == (1.0, 1.0, 2.0, 3.0)
    assert found.mean_s == pytest.approx((98 + 2 + 3) / 100)


def test_a_model_that_does_not_fit_is_refused() -> None:
    large = Replica(model=catalog.get_model("llama3.1-405b"), cluster=CLUSTER)
    with pytest.raises(InputError, match="no room"):
        count_kv_blocks(large, default_scheduler_config(large), 1000)


def test_keys_and_values_travel_by_the_links_between_the_engines() -> None:
    near = build_kv_transfer_time(fleet(1, apart=1))
    wide = CLUSTER.with_gpus(64)
    replica = Replica(model=MODEL, cluster=wide, layout=Layout(tp=8))
    copies = ReplicaPool(replica=replica, scheduler_config=default_scheduler_config(replica))
    far = build_kv_transfer_time(ServingFleet(serving_pool=copies, prefill_pool=copies))
    # 128 KiB a token: 32 layers, keys and values of 8 heads of 128, two bytes each.
    sent = 1000 * 131072
    links, cards = CLUSTER.scale_up, wide.nic_bytes_per_s_per_gpu
    assert near(1000) == pytest.approx(sent / (0.6 * links.gpu_bytes_per_s), rel=0.01)
    assert far(1000) == pytest.approx(sent / (0.6 * 8 * cards), rel=0.05)


@pytest.mark.parametrize(
    ("model", "before", "after", "parts"),
    [
        ("deepseek-v3", 8, 1, 1),
        ("deepseek-v3", 8, 8, 1),
        ("deepseek-v3", 1, 8, 1),
        ("llama3.1-8b", 16, 8, 8),
        ("llama3.1-8b", 8, 4, 4),
        ("llama3.1-8b", 4, 8, 4),
    ],
)
def test_copies_of_keys_and_values_are_handed_over_once(
    model: str, before: int, after: int, parts: int
) -> None:
    wide = catalog.get_cluster("h200-superpod").with_gpus(64)

    def copies(tp: int) -> ReplicaPool:
        layout = Layout(tp=tp, dp=8 // tp, ep=8, expert_tp=1) if tp < 8 else Layout(tp=tp)
        if model != "deepseek-v3":
            layout = Layout(tp=tp)
        replica = Replica(model=catalog.get_model(model), cluster=wide, layout=layout)
        return ReplicaPool(
            replica=replica, scheduler_config=default_scheduler_config(replica), count=2
        )

    took = build_kv_transfer_time(
        ServingFleet(serving_pool=copies(after), prefill_pool=copies(before))
    )(4000)
    # A latent of 61 layers, 512 numbers and 64 of its place; or keys and values of 8 heads.
    whole = 4000 * (61 * 576 * 2 if model == "deepseek-v3" else 131072)
    alone = whole / parts / (0.6 * wide.nic_bytes_per_s_per_gpu)
    assert took == pytest.approx(alone, rel=0.02)


def test_engines_of_one_node_without_fast_links_hand_over_through_the_host() -> None:
    box = catalog.get_cluster("rtx-4090-box")
    replica = Replica(model=MODEL, cluster=box)
    copies = ReplicaPool(replica=replica, scheduler_config=default_scheduler_config(replica))
    near = build_kv_transfer_time(ServingFleet(serving_pool=copies, prefill_pool=copies))
    assert near(1000) == pytest.approx(1000 * 131072 / (0.6 * box.host.gpu_bytes_per_s), rel=0.01)
