"""What software does with memory beside states and activations shows in the prediction."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.predict import StageMemory, TrainingFramework, TrainingRun, predict_memory
from meshwright.predict.memory.activations import (
    activation_bytes_per_token,
    backward_bytes_per_token,
    list_recomputed_ops,
)
from meshwright.predict.memory.buffers import MEMORY_CONSTANTS
from meshwright.predict.training_run.training_framework import EAGER, MEGATRON
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout, count_rank_parameters
from meshwright.spec.workload import LoRASpec, TrainingWorkload

LLAMA = catalog.get_model("llama3.1-8b")
ADAPTER = LoRASpec(rank=16)
BLOCK = LLAMA.blocks[0]
H100 = catalog.get_cluster("h100-superpod").with_gpus(8)
B200 = catalog.get_cluster("b200-superpod").with_gpus(8)


def stage(layout: Layout, software: TrainingFramework = MEGATRON, **fields: Any) -> StageMemory:
    cluster = fields.pop("cluster", H100)
    training = TrainingWorkload(
        tokens=1,
        sequence_length=fields.pop("length", 4096),
        global_batch=fields.pop("batch", 8),
        adapter=fields.pop("adapter", None),
    )
    work = JobSpec(model=LLAMA, cluster=cluster, layout=layout, workload=training)
    assert not fields
    return predict_memory(TrainingRun(work, framework=software)).worst_stage


def parameters(layout: Layout) -> int:
    return count_rank_parameters(layout, LLAMA)[0].total


def test_sharded_weights_are_their_own_master_copy() -> None:
    layout = Layout(dp=8, zero=3)
    held = stage(layout)
    share = parameters(layout) / 8
    assert held.parameters_bytes == pytest.approx(4 * share, rel=1e-6)
    assert held.optimizer_bytes == pytest.approx(8 * share, rel=1e-6)


def test_a_single_microbatch_makes_its_sharded_gradients_after_the_peak() -> None:
    layout = Layout(dp=8, zero=3)
    assert stage(layout).gradients_bytes == 0
    assert stage(layout, batch=16).gradients_bytes == pytest.approx(parameters(layout) / 2)


def test_beside_a_pipeline_sharded_weights_stay_gathered() -> None:
    layout = Layout(dp=4, pp=2, zero=3)
    held = stage(layout)
    # Two bytes of weights and four of summed gradients.
    assert held.buffers_bytes == 6 * count_rank_parameters(layout, LLAMA)[held.stage].total


def test_gathered_layers_are_few() -> None:
    assert stage(Layout(dp=8, zero=3)).buffers_bytes < 0.5 * 2 * parameters(Layout())


def test_plain_software_holds_gradients_beside_their_sum() -> None:
    layout = Layout(dp=8, zero=1)
    assert stage(layout, EAGER).buffers_bytes == 2 * parameters(layout)
    assert stage(layout, MEGATRON).buffers_bytes == 0


def test_sums_in_two_bytes_need_no_copy_but_buckets() -> None:
    layout = Layout(dp=8, zero=1, gradient_precision="bf16")
    assert stage(layout, EAGER).buffers_bytes == MEMORY_CONSTANTS.bucket_bytes


def test_the_update_of_two_byte_gradients_can_be_the_peak() -> None:
    layout = Layout(dp=8, zero=0, gradient_precision="bf16")
    held = stage(layout, length=64)
    moment = held.activations_bytes + held.working_bytes + held.logits_bytes + held.buffers_bytes
    assert moment == pytest.approx(4 * parameters(layout), rel=1e-6)


def test_frozen_weights_have_neither_gradients_nor_moments_but_their_adapters_have() -> None:
    layout = Layout(dp=8, zero=3)
    held = stage(layout, adapter=LoRASpec(rank=1, targets=("qkv",)), software=EAGER, batch=16)
    # Queries, keys and values of Llama-3.1-8B: 4096 in, 4096 + 1024 + 1024 out, 32 layers.
    adapters = 32 * (3 * 4096 + 6144)
    assert held.gradients_bytes == 4 * adapters / 8
    assert held.optimizer_bytes == 8 * adapters / 8
    assert held.parameters_bytes == pytest.approx((2 * parameters(layout) + 4 * adapters) / 8)


def test_frozen_weights_leave_no_gradients_to_reduce() -> None:
    layout = Layout(dp=8, zero=3)
    trained, frozen = stage(layout, batch=16), stage(layout, adapter=ADAPTER, batch=16)
    # Weights gathered one layer ahead stay; two bytes and four of the widest gradient go.
    fewer = trained.buffers_bytes - frozen.buffers_bytes
    assert fewer == pytest.approx(6 * LLAMA.vocab * LLAMA.hidden, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "software", "each"),
    [
        (Layout(dp=8), MEGATRON, MEMORY_CONSTANTS.sharded_logit_bytes),
        (Layout(dp=8), EAGER, MEMORY_CONSTANTS.torch_logit_bytes),
        (Layout(dp=8, zero=3), MEGATRON, MEMORY_CONSTANTS.torch_logit_bytes),
        (Layout(dp=8), replace(EAGER, attention="flash1"), MEMORY_CONSTANTS.inplace_logit_bytes),
    ],
)
def test_logits_weigh_what_the_loss_makes_of_them(
    layout: Layout, software: TrainingFramework, each: int
) -> None:
    assert stage(layout, software).logits_bytes == 4096 * each * LLAMA.vocab


def test_eight_bit_products_keep_their_inputs_in_eight_bits() -> None:
    wide = activation_bytes_per_token(Layout(), BLOCK, LLAMA.hidden)
    low = activation_bytes_per_token(Layout(precision="fp8-tensorwise"), BLOCK, LLAMA.hidden)
    # Two norms and the activation shrink to one byte; the projection adds a cast of its input.
    width = 14336
    assert wide - low == 2 * LLAMA.hidden + width - LLAMA.hidden


def test_pytorch_keeps_what_products_read_in_two_bytes() -> None:
    fp8 = Layout(precision="fp8-tensorwise", zero=3)
    assert activation_bytes_per_token(fp8, BLOCK, LLAMA.hidden) == activation_bytes_per_token(
        replace(fp8, precision="bf16"), BLOCK, LLAMA.hidden
    )


def test_eight_bit_weights_take_one_byte_on_blackwell_only() -> None:
    layout = Layout(dp=8, zero=1, precision="fp8-tensorwise")
    wide = stage(replace(layout, precision="bf16")).parameters_bytes
    assert stage(layout).parameters_bytes == wide
    # Embedding, head and norms stay in two bytes.
    assert wide / 2 < stage(layout, cluster=B200).parameters_bytes < 0.6 * wide


def test_autograd_keeps_gathered_inputs_where_megatron_gathers_again() -> None:
    split = Layout(tp=8, sequence_parallel=True)
    ours = activation_bytes_per_token(split, BLOCK, LLAMA.hidden)
    gate_act = 2 * 14336 / 8
    plain = activation_bytes_per_token(split, BLOCK, LLAMA.hidden, software=EAGER)
    assert plain - ours == pytest.approx(gate_act + 2 * 2 * LLAMA.hidden * 7 / 8)


def test_pytorchs_selective_recompute_keeps_every_second_product() -> None:
    layout = Layout(zero=3, recompute="selective", recompute_ops=("core_attn",))
    assert list_recomputed_ops(layout, EAGER) == "alternate"
    kept = activation_bytes_per_token(layout, BLOCK, LLAMA.hidden, "alternate", software=EAGER)
    # The layer's input, queries, values, attention's output, one half of the MLP, its output.
    assert kept == 2 * (4 * LLAMA.hidden + 1024 + 14336)


def test_named_operations_mean_themselves() -> None:
    layout = Layout(zero=3, recompute="selective", recompute_ops=("mlp",))
    assert list_recomputed_ops(layout, EAGER) == ("mlp",)
    assert list_recomputed_ops(replace(layout, zero=1), MEGATRON) == ("mlp",)


def test_full_recompute_works_on_one_layer_at_a_time() -> None:
    layout = Layout(dp=8, zero=1, recompute="full")
    none = replace(layout, recompute="none")
    full = stage(layout)
    whole = stage(none).activations_bytes / LLAMA.layers
    assert full.activations_bytes == 4096 * 2 * LLAMA.hidden * LLAMA.layers
    assert full.working_bytes + full.logits_bytes >= whole - full.activations_bytes / LLAMA.layers


def test_a_pool_without_room_wastes_less() -> None:
    roomy, tight = stage(Layout(dp=8, zero=3)), stage(Layout(dp=8, zero=1), length=16384)
    shares = [held.fragmentation_bytes / held.allocated_bytes for held in (roomy, tight)]
    assert shares[0] == pytest.approx(MEMORY_CONSTANTS.fragmentation, rel=1e-3)
    assert shares[1] == pytest.approx(MEMORY_CONSTANTS.fragmentation_when_full, rel=1e-3)


def test_every_group_has_buffers_of_its_own() -> None:
    alone, both = stage(Layout(dp=8)), stage(Layout(dp=4, tp=2))
    assert both.runtime_bytes - alone.runtime_bytes == MEMORY_CONSTANTS.communicator_bytes


def test_context_parallel_ranks_hold_keys_of_others() -> None:
    alone, ring = Layout(), Layout(cp=4)
    gathered = replace(ring, cp_kind="allgather")
    sizes = [
        backward_bytes_per_token(layout, BLOCK, LLAMA.hidden) for layout in (alone, ring, gathered)
    ]
    keys_and_values = 2 * 2 * 1024
    assert sizes[1] - sizes[0] == 2 * keys_and_values
    assert sizes[2] - sizes[0] == 4 * keys_and_values
