"""Memory of GPUs in each phase: what is there of either side, and what is left for the cache."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.rl import RLSetup, simulate_rl
from meshwright.predict.rl.rl_framework import MESHWRIGHT, NEMO_RL, RLFramework
from meshwright.predict.rl.rl_memory import GENERATING, SYNCING, TRAINING
from meshwright.predict.rl.trainer_costs import TrainerCosts, build_trainer_costs
from meshwright.predict.serving.cost.kv_memory import predict_serving_memory
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, default_scheduler_config
from meshwright.spec.layout import Layout
from meshwright.spec.model import count_parameters
from meshwright.spec.workload import LoRASpec
from tests.predict.rl.setups import CLUSTER, MODEL, rounds, setup

GPU = CLUSTER.gpu.memory_bytes
WEIGHTS = float(count_parameters(MODEL).total)
"""Two bytes of each, on two GPUs, of either side."""


def cache_bytes(prices: TrainerCosts) -> float:
    return predict_serving_memory(
        prices.rollout_pool.replica, prices.rollout_pool.scheduler_config.max_num_batched_tokens
    ).kv_bytes


def colocated(**given: Any) -> RLSetup:
    return setup("colocated", 16, 16, **given)


def test_the_trainers_weights_stay_and_the_cache_has_what_is_left() -> None:
    ours, apart = build_trainer_costs(colocated()), build_trainer_costs(setup("disaggregated"))
    taken = cache_bytes(apart) - cache_bytes(ours)
    assert WEIGHTS < taken < WEIGHTS + 3e9, "its context stays as well"
    for prices in (ours, apart):
        assert prices.peak_bytes[GENERATING] == pytest.approx(0.9 * GPU)


def test_new_weights_lie_beside_both_weights_and_no_cache() -> None:
    ours = build_trainer_costs(colocated()).peak_bytes[SYNCING]
    assert 3 * WEIGHTS < ours < 3.3 * WEIGHTS
    # An engine of its own keeps its cache, and reads new weights from its host.
    apart = build_trainer_costs(setup("disaggregated")).peak_bytes
    assert apart[SYNCING] == apart[GENERATING]


def test_sides_without_turns_keep_everything_beside_each_other() -> None:
    both = build_trainer_costs(setup("disaggregated", 8, 8, shares_gpus_concurrently=True))
    turns = build_trainer_costs(setup("colocated", 8, 8))
    assert both.peak_bytes[GENERATING] == pytest.approx(0.5 * GPU)
    engine = both.peak_bytes[TRAINING] - turns.peak_bytes[TRAINING]
    assert engine > cache_bytes(both) + WEIGHTS, "an engine keeps its memory while it trains"
    states = turns.memory_phase_s["load"] * (CLUSTER.host.gpu_bytes_per_s * 0.6)
    aside = both.sync.staging_bytes
    assert both.peak_bytes[SYNCING] == pytest.approx(0.5 * GPU + aside)
    assert cache_bytes(turns) - cache_bytes(both) == pytest.approx(0.4 * GPU + states)


def test_a_reference_model_is_moved_and_counted_where_it_lies() -> None:
    plain, pulled = (
        build_trainer_costs(colocated(rollout_batch=rounds(logprob_passes=one))) for one in (1, 2)
    )
    more = pulled.peak_bytes[TRAINING] - plain.peak_bytes[TRAINING]
    assert more == pytest.approx(WEIGHTS, rel=0.02)
    assert pulled.memory_phase_s["load"] > plain.memory_phase_s["load"]
    for doing in (GENERATING, SYNCING):
        assert pulled.peak_bytes[doing] == plain.peak_bytes[doing], "it has left with the states"
    # Some loops compute its log-probabilities alone, and some no reference's in two passes.
    alone = build_trainer_costs(colocated(rollout_batch=rounds(logprob_passes=1, reference=True)))
    assert alone.peak_bytes == pulled.peak_bytes
    none = build_trainer_costs(colocated(rollout_batch=rounds(logprob_passes=2, reference=False)))
    assert none.peak_bytes == plain.peak_bytes


def test_an_adapter_leaves_states_gradients_and_the_reference_out() -> None:
    adapter = LoRASpec(rank=16)
    whole, small = (
        build_trainer_costs(colocated(rollout_batch=rounds(logprob_passes=2, adapter=one)))
        for one in (None, adapter)
    )
    # Weights of a reference, and of states no less than weights have: here shared by eight.
    assert whole.peak_bytes[TRAINING] - small.peak_bytes[TRAINING] > 2 * WEIGHTS
    assert small.memory_phase_s["load"] < whole.memory_phase_s["load"] / 20
    assert small.sync.staging_bytes < WEIGHTS / 50
    assert small.sync.seconds < whole.sync.seconds / 20
    assert small.memory_phase_s["wake weights"] > 0, "from its host again"
    assert "wake weights" not in whole.memory_phase_s
    assert small.step.step_s < whole.step.step_s


def test_an_engine_that_is_lent_weights_has_their_room_for_its_cache() -> None:
    alone = {
        "trainer_layout": Layout(recompute="full"),
        "rollout_batch": rounds(adapter=LoRASpec(rank=16)),
    }
    replica = replace(setup("colocated", 2, 2).rollout_pool.replica, layout=Layout())
    engines = ReplicaPool(
        replica=replica, scheduler_config=default_scheduler_config(replica), count=1
    )
    own, lent = (
        build_trainer_costs(
            replace(colocated(), rollout_pool=engines, shares_trainer_weights=one, **alone)
        )
        for one in (False, True)
    )
    more = cache_bytes(lent) - cache_bytes(own)
    assert more == pytest.approx(2 * WEIGHTS, rel=0.02)
    assert lent.peak_bytes[GENERATING] == pytest.approx(own.peak_bytes[GENERATING])
    assert lent.peak_bytes[TRAINING] == own.peak_bytes[TRAINING]
    fewer = own.peak_bytes[SYNCING] - lent.peak_bytes[SYNCING]
    assert fewer == pytest.approx(2 * WEIGHTS, rel=0.02)
    assert "wake weights" not in lent.memory_phase_s
    fp8 = replace(replica, quantization=replace(replica.quantization, weights="fp8"))
    kept = build_trainer_costs(
        replace(
            colocated(),
            rollout_pool=replace(engines, replica=fp8),
            shares_trainer_weights=True,
            **alone,
        )
    )
    assert kept.peak_bytes[TRAINING] > lent.peak_bytes[TRAINING], "matrices of its own stay"


def test_a_framework_whose_way_with_adapters_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="how NeMo-RL sends adapters is not known"):
        colocated(framework=NEMO_RL, rollout_batch=rounds(adapter=LoRASpec(rank=8)))


def test_who_swaps_leaves_all_of_a_gpu_to_its_engine() -> None:
    theirs = [
        build_trainer_costs(colocated(framework=NEMO_RL, rollout_batch=rounds(logprob_passes=n)))
        for n in (1, 2)
    ]
    assert cache_bytes(theirs[0]) == cache_bytes(build_trainer_costs(setup("disaggregated")))
    assert theirs[0].peak_bytes[GENERATING] == pytest.approx(0.9 * GPU)
    assert theirs[0].peak_bytes == theirs[1].peak_bytes, "a reference is on the host"


def test_an_engine_that_the_trainers_weights_leave_no_room_is_refused() -> None:
    """What is left for the cache is what engines of a simulation have."""

    def tight(one: RLSetup) -> RLSetup:
        replica = one.rollout_pool.replica
        # Weights of one side and buffers take an eighth of a GPU, those of both a quarter.
        engine = replace(replica.engine, gpu_memory_utilization=0.2)
        return replace(
            one, rollout_pool=replace(one.rollout_pool, replica=replace(replica, engine=engine))
        )

    simulate_rl(tight(setup("disaggregated")))
    with pytest.raises(InputError, match=r"what others keep there .* leave no room for requests"):
        simulate_rl(tight(colocated()))


@pytest.mark.parametrize(("framework", "busy"), [(MESHWRIGHT, 2), (NEMO_RL, 4)])
def test_a_framework_deals_groups_or_samples_out(framework: RLFramework, busy: int) -> None:
    few = rounds(prompts_per_step=2, group_size=8)
    run = simulate_rl(
        setup("disaggregated", rollout_batch=few, framework=framework, measured_steps=1)
    )
    first = [bool((did.start_s < run.steps[0].start_s).any()) for did in run.engine_runs]
    assert len(first) == 4
    assert sum(first) == busy
