"""The search for a split: nothing that it looked at is shorter, and reasons are kept."""

import pytest

from meshwright.errors import InputError
from meshwright.predict.rl import Question, plan_rl
from meshwright.predict.rl.setup import share_of
from tests.predict.rl.setups import CLUSTER, MODEL, rounds


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
    assert found.simulations == 4


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
