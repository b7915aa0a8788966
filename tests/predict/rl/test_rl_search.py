"""The search for a split: nothing that it looked at is shorter, and reasons are kept."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.rollout import Placement
from meshwright.predict.rl import RLQuestion, RLSetup, plan_rl, predict_rl
from meshwright.predict.rl.rl_setup import DEFAULT_MEASURED_STEPS, take_gpu_share
from tests.predict.rl.setups import CLUSTER, MODEL, rounds, setup


def test_the_best_split_is_found_and_the_rest_is_ranked() -> None:
    question = RLQuestion(
        model=MODEL, cluster=CLUSTER.with_gpus(32), rollout_batch=rounds(), engine_tp_degrees=(2,),
        placements=("colocated", "async"),
    )  # fmt: skip
    found = plan_rl(question)
    steps = [one.metrics.step_s for one in found.plans]
    assert steps == sorted(steps)
    assert {one.setup.placement for one in found.plans} == {"colocated", "async"}
    apart = next(one for one in found.plans if one.setup.placement == "async")
    assert apart.metrics.rollout_gpus + apart.metrics.training_gpus == 32
    assert apart.metrics.rollout_gpus in (8, 16, 24)
    # Four are screened; then those that are shown are simulated at length, some splits beside them.
    assert 6 <= found.simulations <= 7


def test_plans_are_ranked_by_what_a_simulation_of_their_own_says() -> None:
    question = RLQuestion(
        model=MODEL,
        cluster=CLUSTER,
        rollout_batch=rounds(),
        engine_tp_degrees=(2, 4),
        placements=("async",),
    )
    for plan in plan_rl(question).plans:
        fields = {name: getattr(plan.setup, name) for name in plan.setup.__struct_fields__}
        del fields["measured_steps"]
        assert predict_rl(RLSetup(**fields), even=False) == plan.metrics


def test_the_best_synchronous_plan_is_among_few_that_are_asked_for() -> None:
    question = RLQuestion(
        model=MODEL, cluster=CLUSTER, rollout_batch=rounds(), engine_tp_degrees=(2, 4),
        placements=("disaggregated", "one_step_off"),
    )  # fmt: skip
    found = plan_rl(question, most=1)
    assert [one.setup.placement for one in found.plans] == ["one_step_off", "disaggregated"]


@pytest.mark.parametrize("placement", ["colocated", "one_step_off", "async"])
def test_as_many_steps_are_measured_as_make_a_step_steady(placement: Placement) -> None:
    asked = rounds(prompts_per_step=32, group_size=8)
    gpus = (16, 16) if placement == "colocated" else (8, 8)
    usual, long = (
        predict_rl(
            setup(placement, *gpus, rollout_batch=asked, measured_steps=measured), even=False
        )
        for measured in (DEFAULT_MEASURED_STEPS, 96)
    )
    assert usual.step_s == pytest.approx(long.step_s, rel=0.04)


def test_a_part_of_a_node_is_a_node_of_its_own() -> None:
    part = take_gpu_share(CLUSTER, 4)
    assert (part.gpus, part.nodes, part.scale_up.gpus) == (4, 1, 4)
    assert take_gpu_share(CLUSTER, 8).gpus == 8
    with pytest.raises(InputError, match="12 GPUs are no whole nodes of 8"):
        take_gpu_share(CLUSTER, 12)


def test_where_nothing_fits_the_reason_is_told() -> None:
    question = RLQuestion(
        model=MODEL,
        cluster=take_gpu_share(CLUSTER, 1),
        rollout_batch=rounds(),
        placements=("colocated",),
    )
    with pytest.raises(InputError, match="nothing fits on 1 GPUs"):
        plan_rl(question)
