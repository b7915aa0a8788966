"""The busiest expert rank sets the pace, and holds the most."""

from typing import Any

import pytest

from meshwright.predict import TrainingRun, predict_memory, predict_step
from meshwright.predict.memory.activations import saved_bytes
from meshwright.predict.memory.saved_tensors import list_saved_tensors
from meshwright.predict.step.block_comm import predict_block_comm
from meshwright.predict.step.block_time import block_passes
from meshwright.spec import JobSpec, Layout, TrainingWorkload, catalog
from meshwright.spec.model import Model, MoESpec

MIXTRAL, DEEPSEEK = catalog.get_model("mixtral-8x7b"), catalog.get_model("deepseek-v3")


def run_of(imbalance: float = 1.0, model: Model = MIXTRAL, **layout: Any) -> TrainingRun:
    found = Layout(**{"dp": 8, "ep": 8, "zero": 1, **layout})
    cluster = catalog.get_cluster("h100-superpod").with_gpus(max(8, found.gpus))
    step = TrainingWorkload(
        tokens=1, sequence_length=4096, global_batch=found.dp, expert_imbalance=imbalance
    )
    return TrainingRun(JobSpec(model=model, cluster=cluster, layout=found, workload=step))


def load(run: TrainingRun) -> float:
    experts = next(block.mlp for block in run.model.blocks if isinstance(block.mlp, MoESpec))
    return run.expert_load(experts)


def test_balance_is_the_default() -> None:
    work = TrainingWorkload(tokens=1, sequence_length=1, global_batch=1)
    assert work.expert_imbalance == 1
    assert load(run_of()) == 1


def test_a_rank_with_every_expert_has_its_own_tokens_whatever_they_choose() -> None:
    skewed, even = run_of(2.0, ep=1), run_of(1.0, ep=1)
    assert predict_step(skewed) == predict_step(even)
    assert predict_memory(skewed) == predict_memory(even)


def test_a_token_visits_an_expert_once() -> None:
    # Mixtral: 8 experts, 2 for each token. One expert a rank gets at most every token once, which
    # is four times the mean; four a rank can get both copies of every token, twice the mean.
    assert load(run_of(9.0, ep=8)) == 4
    assert load(run_of(9.0, ep=2)) == 2


def test_products_of_experts_grow_with_their_tokens() -> None:
    block = MIXTRAL.blocks[0]
    even, skewed = (block_passes(run_of(value), block) for value in (1.0, 2.0))
    # Most of a Mixtral block is its experts, which get twice the tokens.
    assert 1.5 < skewed.forward_s / even.forward_s < 2.0
    assert 1.5 < skewed.wgrad_s / even.wgrad_s < 2.0


def test_the_exchange_waits_for_the_busiest_rank() -> None:
    block = MIXTRAL.blocks[0]
    waits = []
    for value in (1.0, 1.5, 2.0):
        run = run_of(value)
        waits.append(predict_block_comm(run, block, block_passes(run, block)).ep_forward_s)
    assert waits[0] < waits[1] < waits[2] <= 2 * waits[0]


def test_routed_activations_grow_and_no_others() -> None:
    even, skewed = (predict_memory(run_of(value)).worst_stage for value in (1.0, 1.5))
    block, layout = MIXTRAL.blocks[0], Layout()
    routed = sum(
        saved_bytes(layout, saved)
        for saved in list_saved_tensors(block, MIXTRAL.hidden)
        if saved.name in ("dispatched", "experts_in", "experts_act")
    )
    more = skewed.activations_bytes - even.activations_bytes
    assert more == pytest.approx(0.5 * routed * 4096 * MIXTRAL.layers)
    assert skewed.parameters_bytes == even.parameters_bytes


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_gets_longer_with_imbalance(recompute: str) -> None:
    layout = {"dp": 64, "ep": 32, "recompute": recompute}
    runs = [run_of(value, DEEPSEEK, **layout) for value in (1.0, 1.2, 2.0)]
    steps = [predict_step(run).step_s for run in runs]
    assert steps == sorted(steps)
    assert steps[0] < steps[2] < 2 * steps[0]
