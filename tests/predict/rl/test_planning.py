"""The search for a split: nothing that it looked at is shorter, and reasons are kept."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.rollout import Placement
from meshwright.predict.rl import Question, Setup, plan_rl, predict_rl
from meshwright.predict.rl.setup import MEASURED, share_of
from tests.predict.rl.setups import CLUSTER, MODEL, rounds, setup


def test_the_best_split_is_found_and_the_rest_is_ranked() -> None:
    question = Question(
        model=MODEL, cluster=CLUSTER.with_gpus(32), rounds=rounds(), degrees=(2,),
        placements=("colocated", "asynchronous"),
    )  # fmt: skip
    found = plan_rl(question)
    steps = [one.outcome.step_s for one in found.plans]
    assert steps == sorted(steps)
    assert {one.setup.placement for one in found.plans} == {"colocated", "asynchronous"}
    apart = next(one for one in found.plans if one.setup.placement == "asynchronous")
    assert apart.outcome.rollout_gpus + apart.outcome.training_gpus == 32
    assert apart.outcome.rollout_gpus in (8, 16, 24)
    # Four are screened; then those that are shown are simulated at length, some splits beside them.
    assert 6 <= found.simulations <= 7


def test_plans_are_ranked_by_what_a_simulation_of_their_own_says() -> None:
    question = Question(
        model=MODEL, cluster=CLUSTER, rounds=rounds(), degrees=(2, 4), placements=("asynchronous",)
    )
    for plan in plan_rl(question).plans:
        fields = {name: getattr(plan.setup, name) for name in plan.setup.__struct_fields__}
        del fields["measured"]
        assert predict_rl(Setup(**fields), even=False) == plan.outcome


def test_the_best_synchronous_plan_is_among_few_that_are_asked_for() -> None:
    question = Question(
        model=MODEL, cluster=CLUSTER, rounds=rounds(), degrees=(2, 4),
        placements=("disaggregated", "one-step-off"),
    )  # fmt: skip
    found = plan_rl(question, most=1)
    assert [one.setup.placement for one in found.plans] == ["one-step-off", "disaggregated"]


@pytest.mark.parametrize("placement", ["colocated", "one-step-off", "asynchronous"])
def test_as_many_steps_are_measured_as_make_a_step_steady(placement: Placement) -> None:
    asked = rounds(prompts=32, samples=8)
    gpus = (16, 16) if placement == "colocated" else (8, 8)
    usual, long = (
        predict_rl(setup(placement, *gpus, rounds=asked, measured=measured), even=False)
        for measured in (MEASURED, 96)
    )
    assert usual.step_s == pytest.approx(long.step_s, rel=0.04)


def test_a_part_of_a_node_is_a_node_of_its_own() -> None:
    part = share_of(CLUSTER, 4)
    assert (part.gpus, part.nodes, part.scale_up.gpus) == (4, 1, 4)
    assert share_of(CLUSTER, 8).gpus == 8
    with pytest.raises(InputError, match="12 GPUs are no whole nodes of 8"):
        share_of(CLUSTER, 12)


def test_where_nothing_fits_the_reason_is_told() -> None:
    question = Question(
        model=MODEL, cluster=share_of(CLUSTER, 1), rounds=rounds(), placements=("colocated",)
    )
    with pytest.raises(InputError, match="nothing fits on 1 GPUs"):
        plan_rl(question)
