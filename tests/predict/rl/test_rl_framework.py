"""What a framework does beside generating and training."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.policy.rollout import Placement
from meshwright.predict.rl import RLSetup
from meshwright.predict.rl.all_gather_sync import predict_all_gather_sync
from meshwright.predict.rl.rl_framework import (
    MESHWRIGHT,
    NEMO_RL,
    NEMO_RL_04,
    PhaseTraffic,
    RLFramework,
    get_host_rates,
    memory_phase_s,
    reference_swap_s,
)
from meshwright.predict.rl.rl_simulation import simulate_rl
from meshwright.predict.rl.trainer_costs import build_trainer_costs
from meshwright.predict.rl.weight_sync import predict_weight_sync
from meshwright.spec.job_spec import read_cluster, read_model
from meshwright.spec.layout import Layout
from meshwright.spec.model import count_parameters
from tests.predict.rl.setups import CLUSTER, rounds, setup

MOVES = PhaseTraffic(
    trainer_weight_bytes=8e9, optimizer_bytes=6e9, reference_bytes=8e9, engine_weight_bytes=16e9
)


def test_a_framework_that_swaps_moves_more_and_through_slower_memory() -> None:
    rates = get_host_rates(CLUSTER)
    assert rates.pageable_bytes_per_s < rates.pinned_bytes_per_s < CLUSTER.host.gpu_bytes_per_s
    ours, theirs = memory_phase_s(MESHWRIGHT, MOVES, rates), memory_phase_s(NEMO_RL, MOVES, rates)
    assert ours == pytest.approx(
        dict.fromkeys(("load", "offload"), 14e9 / rates.pinned_bytes_per_s)
    )
    alone = memory_phase_s(MESHWRIGHT, MOVES._replace(reference_bytes=0.0), rates)
    assert alone["load"] == pytest.approx(6e9 / rates.pinned_bytes_per_s)
    assert theirs["load"] == pytest.approx(
        8e9 / rates.pinned_bytes_per_s + 6e9 / rates.pageable_bytes_per_s
    )
    assert (
        theirs["sleep"] == theirs["wake weights"] == pytest.approx(16e9 / rates.pinned_bytes_per_s)
    )


@pytest.mark.parametrize(
    ("framework", "forwards", "shared", "moved"),
    [
        (MESHWRIGHT, 2, False, 0.0),
        (NEMO_RL, 1, False, 0.0),
        (NEMO_RL, 2, False, 24e9),
        (NEMO_RL_04, 2, True, 24e9),
        (NEMO_RL_04, 2, False, 36e9),
    ],
)
def test_a_reference_model_takes_the_place_of_the_policy(
    framework: RLFramework, forwards: int, shared: bool, moved: float
) -> None:
    rates = get_host_rates(CLUSTER)
    found = reference_swap_s(framework, MOVES, rates, forwards=forwards, shared=shared)
    assert found == pytest.approx(moved / rates.pageable_bytes_per_s)


def _piped(layout: Layout, **given: Any) -> RLSetup:
    return replace(setup("disaggregated", **given), trainer_layout=layout)


def test_pipelines_that_fill_microbatches_up_train_longer() -> None:
    layout = Layout(pp=2, dp=4, zero=1, recompute="full")
    ours, theirs = (
        build_trainer_costs(
            _piped(layout, rollout_batch=rounds(microbatch_tokens=4096), framework=one)
        )
        for one in (MESHWRIGHT, NEMO_RL)
    )
    assert theirs.padded_tokens > ours.padded_tokens
    assert theirs.step.step_s > ours.step.step_s
    assert theirs.tokens == ours.tokens


def test_passes_without_gradients_fill_a_pipeline_of_their_own() -> None:
    layout = Layout(pp=8, zero=0, recompute="full")
    few, many = (
        build_trainer_costs(
            _piped(
                layout, rollout_batch=rounds(microbatch_tokens=4096, logprob_microbatch_tokens=room)
            )
        )
        for room in (16384, 4096)
    )
    assert few.step == many.step
    # Fewer, larger microbatches leave stages idle for longer.
    assert few.forward_s > 1.3 * many.forward_s


@pytest.mark.parametrize(("placement", "gpus"), [("colocated", 16), ("disaggregated", 8)])
def test_gathering_the_whole_model_moves_more_than_sending_slices(
    placement: Placement, gpus: int
) -> None:
    plan, whole = (
        predict_weight_sync(setup(placement, gpus, gpus, framework=one))
        for one in (MESHWRIGHT, NEMO_RL)
    )
    assert whole.moved_bytes > plan.moved_bytes
    assert whole.seconds > 0


def test_all_of_a_model_leaves_through_one_link() -> None:
    model = read_model("qwen3-30b-a3b", "model")
    cluster = read_cluster("h100-superpod", "cluster").with_gpus(64)
    found = [
        predict_all_gather_sync(
            model=model, cluster=cluster, training=Layout(ep=8, dp=16), serving=Layout(tp=4),
            engines=engines, shared=False,
        ).send_s
        for engines in (4, 12)
    ]  # fmt: skip
    least = 2 * count_parameters(model).total / cluster.nic_bytes_per_s_per_gpu
    assert least < found[0] < 1.5 * least
    # More engines listen, no more links send.
    assert found[1] == pytest.approx(found[0], rel=0.2)


def test_more_stages_and_experts_to_gather_from_take_longer() -> None:
    model = read_model("qwen3-30b-a3b", "model")
    cluster = read_cluster("h100-superpod", "cluster").with_gpus(64)
    near, far = (
        predict_all_gather_sync(
            model=model, cluster=cluster, training=layout, serving=Layout(tp=4), engines=16,
            shared=True,
        )
        for layout in (Layout(ep=8, dp=64), Layout(ep=8, dp=16, pp=4))
    )  # fmt: skip
    assert far.send_s > near.send_s > 0


def test_engines_that_keep_old_keys_and_values_go_on_at_once() -> None:
    kept = replace(MESHWRIGHT, recomputes_kv_cache=False)
    anew, old = (simulate_rl(setup("async", framework=one)) for one in (MESHWRIGHT, kept))
    assert old.steps[-1].end_s < anew.steps[-1].end_s
