"""Adapters beside frozen weights: how many numbers, how much memory, how much time."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.predict import TrainingFramework, TrainingRun, predict_memory
from meshwright.predict.memory.activations import activation_bytes_per_token
from meshwright.predict.memory.saved_tensors import list_adapter_tensors
from meshwright.predict.step.block_time import block_passes
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.predict.training_run.training_framework import EAGER, MEGATRON
from meshwright.spec import JobSpec, Layout, TrainingWorkload, catalog
from meshwright.spec.layout import RankParameters, count_rank_parameters
from meshwright.spec.model import Model
from meshwright.spec.workload import LoRASpec, LoRATarget

LLAMA, MIXTRAL = catalog.get_model("llama3.1-8b"), catalog.get_model("mixtral-8x7b")
ALL = LoRASpec(rank=16)
QKV = LoRASpec(rank=16, targets=("qkv",))


def run_of(
    adapter: LoRASpec | None = ALL,
    software: TrainingFramework = MEGATRON,
    model: Model = LLAMA,
    **layout: Any,
) -> TrainingRun:
    found = Layout(**layout)
    cluster = catalog.get_cluster("h100-superpod").with_gpus(max(8, found.gpus))
    step = TrainingWorkload(tokens=1, sequence_length=4096, global_batch=8, adapter=adapter)
    work = JobSpec(model=model, cluster=cluster, layout=found, workload=step)
    return TrainingRun(work, framework=software)


def trained(*args: Any, **fields: Any) -> int:
    return sum(rank.total for rank in count_trained_parameters(run_of(*args, **fields)))


def test_peft_trains_its_published_number_of_parameters() -> None:
    # What PEFT prints for Llama-3-8B with r = 16 on all linear layers.
    assert trained(software=EAGER) == 41_943_040


def test_fused_matrices_share_one_pair() -> None:
    # Queries, keys and values read one A each in PEFT, one together in Megatron-Bridge.
    assert trained(QKV, EAGER) - trained(QKV, MEGATRON) == 32 * 2 * 16 * 4096


def test_without_adapters_all_is_trained() -> None:
    run = run_of(None, tp=2, pp=2)
    assert count_trained_parameters(run) == count_rank_parameters(run.layout, LLAMA)
    assert not run.frozen


def test_tensor_parallel_cuts_the_side_that_it_cuts_of_the_matrix() -> None:
    whole, half = (trained(LoRASpec(rank=1, targets=("out",)), tp=tp) for tp in (1, 2))
    assert (whole, half) == (32 * (4096 + 4096), 32 * (2048 + 4096))


def test_pipeline_ranks_share_the_adapters() -> None:
    assert trained(pp=4) == trained()


def test_routed_experts_carry_none_unless_named() -> None:
    named = LoRASpec(rank=16, targets=("experts",))
    assert count_trained_parameters(run_of(model=MIXTRAL))[0].experts == 0
    one = 32 * 16 * (4096 + 2 * 14336 + 14336 + 4096)
    assert count_trained_parameters(run_of(named, model=MIXTRAL, dp=8, ep=4)) == (
        RankParameters(0, 0, 2 * one),
    )


def test_an_adapter_beside_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="no matrix called experts"):
        run_of(LoRASpec(rank=16, targets=("experts",)))


def test_states_are_those_of_the_adapters_beside_two_bytes_a_weight() -> None:
    held = predict_memory(run_of()).worst_stage
    number = trained()
    assert held.parameters_bytes == 2 * count_rank_parameters(Layout(), LLAMA)[0].total + 2 * number
    assert held.gradients_bytes == 4 * number
    assert held.optimizer_bytes == 12 * number


def test_sharding_shares_the_states_of_adapters() -> None:
    alone, shared = (predict_memory(run_of(dp=8, zero=zero)).worst_stage for zero in (0, 1))
    assert shared.optimizer_bytes == alone.optimizer_bytes / 8
    assert shared.parameters_bytes == alone.parameters_bytes


def kept(adapter: LoRASpec | None, **layout: Any) -> float:
    return activation_bytes_per_token(
        Layout(**layout), LLAMA.blocks[0], LLAMA.hidden, adapter=adapter
    )


def inner(adapter: LoRASpec) -> float:
    tensors = list_adapter_tensors(LLAMA.blocks[0], LLAMA.hidden, adapter)
    return 2 * sum(tensor.width for tensor in tensors)


@pytest.mark.parametrize(
    ("target", "saved"),
    # Both norms' outputs and the product of the gate feed only the named product; attention needs
    # its own output whoever else reads it.
    [("qkv", 4096 + 14336), ("out", 2 * 4096 + 14336), ("up", 4096 + 14336), ("down", 2 * 4096)],
)
def test_inputs_of_products_without_adapters_are_not_kept(target: LoRATarget, saved: int) -> None:
    adapter = LoRASpec(rank=16, targets=(target,))
    assert kept(None) - (kept(adapter) - inner(adapter)) == 2 * saved


def test_adapters_everywhere_keep_what_training_keeps_and_their_own_middle() -> None:
    assert kept(ALL) == kept(None) + 2 * 4 * 16


def test_adapters_keep_their_input_gathered_and_in_two_bytes() -> None:
    split = {"tp": 8, "sequence_parallel": True}
    # Both norms' outputs, of which training keeps an eighth and gathers it again.
    more = 2 * 2 * 4096 * (1 - 1 / 8)
    assert kept(ALL, **split) - inner(ALL) == pytest.approx(kept(None, **split) + more)
    eight = {"precision": "fp8-tensorwise"}
    narrow = 2 * 4096 + 14336  # training keeps these in one byte, and a second copy of one
    assert kept(ALL, **eight) - inner(ALL) == kept(None, **eight) + narrow - 4096


def test_only_adapters_have_weight_gradients() -> None:
    block = LLAMA.blocks[0]
    frozen, whole = (block_passes(run_of(adapter), block) for adapter in (ALL, None))
    assert 0 < frozen.wgrad_s < 0.2 * whole.wgrad_s
    assert frozen.forward_s > whole.forward_s
    assert frozen.dgrad_s > whole.dgrad_s


def test_fewer_targets_cost_less_time_and_memory() -> None:
    few, many = run_of(QKV), run_of(ALL)
    block = LLAMA.blocks[0]
    assert block_passes(few, block).forward_s < block_passes(many, block).forward_s
    assert (
        predict_memory(few).worst_stage.total_bytes < predict_memory(many).worst_stage.total_bytes
    )


def test_rank_hardly_matters_to_time() -> None:
    # Their products are bound by the activations they read and write.
    low, high = (block_passes(run_of(LoRASpec(rank=r)), LLAMA.blocks[0]).forward_s for r in (8, 32))
    assert low <= high < 1.05 * low


def test_adapters_in_experts_take_time() -> None:
    block = MIXTRAL.blocks[0]
    named = LoRASpec(rank=16, targets=("qkv", "experts"))
    few, more = (block_passes(run_of(one, model=MIXTRAL), block) for one in (QKV, named))
    assert more.forward_s > few.forward_s
    assert more.wgrad_s > few.wgrad_s
