"""Adapters beside frozen weights: how many numbers, how much memory, how much time."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.predict import Run, Software, predict_memory
from meshwright.predict.activations import bytes_per_token
from meshwright.predict.adapters import trained_parameters
from meshwright.predict.block_time import block_passes
from meshwright.predict.saved_tensors import adapter_tensors
from meshwright.predict.software import EAGER, MEGATRON
from meshwright.spec import Layout, Training, Work, catalog
from meshwright.spec.layout import RankParameters, rank_parameters
from meshwright.spec.model import Model
from meshwright.spec.workload import Adapter, Target

LLAMA, MIXTRAL = catalog.model("llama3.1-8b"), catalog.model("mixtral-8x7b")
ALL = Adapter(rank=16)
QKV = Adapter(rank=16, targets=("qkv",))


def run_of(
    adapter: Adapter | None = ALL,
    software: Software = MEGATRON,
    model: Model = LLAMA,
    **layout: Any,
) -> Run:
    found = Layout(**layout)
    cluster = catalog.cluster("h100-superpod").with_gpus(max(8, found.gpus))
    step = Training(tokens=1, sequence_length=4096, global_batch=8, adapter=adapter)
    work = Work(model=model, cluster=cluster, layout=found, workload=step)
    return Run(work, software=software)


def trained(*args: Any, **fields: Any) -> int:
    return sum(rank.total for rank in trained_parameters(run_of(*args, **fields)))


def test_peft_trains_its_published_number_of_parameters() -> None:
    # What PEFT prints for Llama-3-8B with r = 16 on all linear layers.
    assert trained(software=EAGER) == 41_943_040


def test_fused_matrices_share_one_pair() -> None:
    # Queries, keys and values read one A each in PEFT, one together in Megatron-Bridge.
    assert trained(QKV, EAGER) - trained(QKV, MEGATRON) == 32 * 2 * 16 * 4096


def test_without_adapters_all_is_trained() -> None:
    run = run_of(None, tp=2, pp=2)
    assert trained_parameters(run) == rank_parameters(run.layout, LLAMA)
    assert not run.frozen


def test_tensor_parallel_cuts_the_side_that_it_cuts_of_the_matrix() -> None:
    whole, half = (trained(Adapter(rank=1, targets=("out",)), tp=tp) for tp in (1, 2))
    assert (whole, half) == (32 * (4096 + 4096), 32 * (2048 + 4096))


def test_pipeline_ranks_share_the_adapters() -> None:
    assert trained(pp=4) == trained()


def test_routed_experts_carry_none_unless_named() -> None:
    named = Adapter(rank=16, targets=("experts",))
    assert trained_parameters(run_of(model=MIXTRAL))[0].experts == 0
    one = 32 * 16 * (4096 + 2 * 14336 + 14336 + 4096)
    assert trained_parameters(run_of(named, model=MIXTRAL, dp=8, ep=4)) == (
        RankParameters(0, 0, 2 * one),
    )


def test_an_adapter_beside_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="no matrix called experts"):
        run_of(Adapter(rank=16, targets=("experts",)))


def test_states_are_those_of_the_adapters_beside_two_bytes_a_weight() -> None:
    held = predict_memory(run_of()).worst
    number = trained()
    assert held.parameters_bytes == 2 * rank_parameters(Layout(), LLAMA)[0].total + 2 * number
    assert held.gradients_bytes == 4 * number
    assert held.optimizer_bytes == 12 * number


def test_sharding_shares_the_states_of_adapters() -> None:
    alone, shared = (predict_memory(run_of(dp=8, zero=zero)).worst for zero in (0, 1))
    assert shared.optimizer_bytes == alone.optimizer_bytes / 8
    assert shared.parameters_bytes == alone.parameters_bytes


def kept(adapter: Adapter | None, **layout: Any) -> float:
    return bytes_per_token(Layout(**layout), LLAMA.blocks[0], LLAMA.hidden, adapter=adapter)


def inner(adapter: Adapter) -> float:
    tensors = adapter_tensors(LLAMA.blocks[0], LLAMA.hidden, adapter)
    return 2 * sum(tensor.width for tensor in tensors)


@pytest.mark.parametrize(
    ("target", "saved"),
    # Both norms' outputs and the product of the gate feed only the named product; attention needs
    # its own output whoever else reads it.
    [("qkv", 4096 + 14336), ("out", 2 * 4096 + 14336), ("up", 4096 + 14336), ("down", 2 * 4096)],
)
def test_inputs_of_products_without_adapters_are_not_kept(target: Target, saved: int) -> None:
    adapter = Adapter(rank=16, targets=(target,))
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
    assert 0 < frozen.weight_gradient < 0.2 * whole.weight_gradient
    assert frozen.forward > whole.forward
    assert frozen.input_gradient > whole.input_gradient


def test_fewer_targets_cost_less_time_and_memory() -> None:
    few, many = run_of(QKV), run_of(ALL)
    block = LLAMA.blocks[0]
    assert block_passes(few, block).forward < block_passes(many, block).forward
    assert predict_memory(few).worst.total_bytes < predict_memory(many).worst.total_bytes


def test_rank_hardly_matters_to_time() -> None:
    # Their products are bound by the activations they read and write.
    low, high = (block_passes(run_of(Adapter(rank=r)), LLAMA.blocks[0]).forward for r in (8, 32))
    assert low <= high < 1.05 * low


def test_adapters_in_experts_take_time() -> None:
    block = MIXTRAL.blocks[0]
    named = Adapter(rank=16, targets=("qkv", "experts"))
    few, more = (block_passes(run_of(one, model=MIXTRAL), block) for one in (QKV, named))
    assert more.forward > few.forward
    assert more.weight_gradient > few.weight_gradient
