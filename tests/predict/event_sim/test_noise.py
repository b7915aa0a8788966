"""Jitter, slow GPUs and uneven experts cost what they should, and many replicas cost more."""

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.predict.event_sim.action_costs import imbalance_passes
from meshwright.predict.event_sim.noise import StepNoise
from meshwright.predict.event_sim.replicas import simulate_replicas
from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.predict.step.stage_time import chunk_times
from meshwright.spec.layout import ScheduleKind
from tests.predict.runs import KINDS, LLAMA, MIXTRAL, run_of


def test_bad_noise_is_all_named() -> None:
    with pytest.raises(InputError) as caught:
        StepNoise(jitter_cv=-1, slow_share=2, slow_factor=0.5, expert_load=float("nan"))
    where = [one.where for one in caught.value.problems]
    assert where == ["jitter_cv", "slow_share", "slow_factor", "expert_load"]


def test_uneven_experts_stretch_their_products_and_their_exchange() -> None:
    run = run_of(model=MIXTRAL, ep=8, dp=8, batch=64)
    usual = simulate_step(run)
    uneven = simulate_step(run, noise=StepNoise(expert_load=1.5))
    growth = (uneven.actions.breakdown_s - usual.actions.breakdown_s)[usual.actions.op == 0][0]
    block = run.model.blocks[0]
    layers = run.model.layers // 4
    assert growth[1] == pytest.approx(0.5 * layers * imbalance_passes(run, block).forward_s)
    assert growth[4] == pytest.approx(0.5 * chunk_times(run)[0].ep_forward_s)
    assert uneven.step_s > usual.step_s


def test_experts_take_most_of_a_layer_and_no_more_than_all_of_it() -> None:
    run = run_of(model=MIXTRAL, ep=8, dp=8, batch=64)
    forward = imbalance_passes(run, run.model.blocks[0]).forward_s * run.model.layers
    whole = sum(time.total.forward_s for time in chunk_times(run))
    assert 0.3 * whole < forward < whole


@pytest.mark.parametrize("model", [MIXTRAL, LLAMA])
def test_load_means_nothing_where_every_rank_has_all_experts_or_none(model: object) -> None:
    run = run_of(model=model, dp=8, batch=64)
    uneven = simulate_step(run, noise=StepNoise(expert_load=2))
    assert uneven.step_s == simulate_step(run).step_s


def test_load_that_changes_costs_more_than_load_that_stays() -> None:
    run = run_of(model=MIXTRAL, ep=8, dp=8, batch=8 * 32)
    steady = simulate_step(run, noise=StepNoise(expert_load=1.4))
    changing = simulate_step(run, noise=StepNoise(expert_load=1.4, expert_load_cv=0.5))
    assert changing.step_s > steady.step_s
    assert sum(changing.busy_s) == pytest.approx(sum(steady.busy_s), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_quiet_replicas_take_one_simulated_step(kind: ScheduleKind) -> None:
    run = run_of(kind, model=LLAMA, dp=4, zero=1, batch=32)
    assert simulate_replicas(run, StepNoise()).step_s == pytest.approx(simulate_step(run).step_s)


def test_the_slowest_of_more_replicas_is_slower() -> None:
    noise = StepNoise(jitter_cv=0.1)
    steps = []
    for dp in (1, 8, 64):
        run = run_of(dp=dp, batch=8 * dp)
        steps.append(
            np.mean([simulate_replicas(run, noise, seed=seed).step_s for seed in range(8)])
        )
    assert steps[0] < steps[1] < steps[2]


def test_the_largest_of_many_is_where_order_statistics_put_it() -> None:
    run = run_of(dp=64, batch=8 * 64)
    found = [simulate_replicas(run, StepNoise(jitter_cv=0.1), seed=seed) for seed in range(20)]
    every = np.concatenate([one.passes_s for one in found])
    largest = np.mean([one.passes_s.max() for one in found])
    # The mean of the largest of 64 normal draws lies 2.39 standard deviations above the mean.
    assert (largest - every.mean()) / every.std() == pytest.approx(2.39, abs=0.4)


def test_replicas_that_share_experts_run_in_step() -> None:
    tied = simulate_replicas(run_of(model=MIXTRAL, dp=8, ep=8, batch=64), StepNoise(jitter_cv=0.1))
    apart = simulate_replicas(run_of(model=MIXTRAL, dp=8, batch=64), StepNoise(jitter_cv=0.1))
    assert len(tied.passes_s) == 1
    assert len(apart.passes_s) == 8


def test_a_few_slow_gpus_slow_a_large_job_down() -> None:
    run = run_of(dp=256, tp=8, batch=256 * 8)
    usual = simulate_replicas(run, StepNoise()).step_s
    slow = simulate_replicas(run, StepNoise(slow_share=0.01, slow_factor=1.2)).step_s
    assert 1.05 * usual < slow < 1.2 * usual


def test_the_same_seed_gives_the_same_replicas() -> None:
    run = run_of(dp=4, batch=32)
    one, same, other = (
        simulate_replicas(run, StepNoise(jitter_cv=0.1), seed=seed).step_s for seed in (1, 1, 2)
    )
    assert one == same != other
