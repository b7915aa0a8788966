"""Recompute costs the forward work that it does again, no more and no less."""

import msgspec
import pytest

from meshwright.predict import TrainingRun
from meshwright.predict.step.block_comm import predict_block_comm
from meshwright.predict.step.block_time import attention_passes, block_passes
from meshwright.predict.step.recompute_time import recompute_s
from meshwright.predict.training_run.training_framework import (
    EAGER,
    MEGATRON,
    MESHWRIGHT,
    TrainingFramework,
)
from meshwright.spec import JobSpec, Layout, TrainingWorkload, catalog
from meshwright.spec.layout import Recompute, RecomputeOp
from meshwright.spec.model import MLPSpec

LLAMA, MIXTRAL = catalog.get_model("llama3.1-8b"), catalog.get_model("mixtral-8x7b")
NODE = catalog.get_cluster("dgx-h100")


def seconds(
    kind: Recompute,
    *ops: RecomputeOp,
    software: TrainingFramework = MEGATRON,
    model: str = "llama3.1-8b",
) -> tuple[float, TrainingRun]:
    layout = Layout(dp=8, recompute=kind, recompute_ops=ops)
    step = TrainingWorkload(tokens=1, sequence_length=4096, global_batch=8)
    run = TrainingRun(
        JobSpec(model=catalog.get_model(model), cluster=NODE, layout=layout, workload=step),
        framework=software,
    )
    block = run.model.blocks[0]
    passes = block_passes(run, block)
    return recompute_s(run, block, passes, predict_block_comm(run, block, passes)), run


def test_none_costs_nothing() -> None:
    assert seconds("none")[0] == 0


def test_full_is_the_forward_pass_again() -> None:
    found, run = seconds("full")
    assert found == pytest.approx(block_passes(run, run.model.blocks[0]).forward_s)


def test_the_core_alone_is_attention_again() -> None:
    found, run = seconds("selective", "core_attn")
    assert found == pytest.approx(attention_passes(run, run.model.blocks[0]).forward_s)


def test_pytorch_stops_before_the_last_product() -> None:
    whole, _ = seconds("full", software=msgspec.structs.replace(EAGER, early_stop=False))
    early, _ = seconds("full", software=EAGER)
    assert 0.7 * whole < early < 0.95 * whole


def test_checkpointing_that_waits_for_the_host_costs_that_on_top() -> None:
    waits = msgspec.structs.replace(MEGATRON, rng_state_sync=True)
    slow, run = seconds("full", software=waits)
    assert slow - seconds("full")[0] == pytest.approx(run.constants.rng_state_sync_s)


def test_more_operations_cost_more_and_less_than_all() -> None:
    act, _ = seconds("selective", "mlp_act")
    both, _ = seconds("selective", "mlp_act", "layernorm")
    mlp, _ = seconds("selective", "mlp")
    assert 0 < act < both < mlp < seconds("full")[0]


def test_our_own_backward_activates_again_for_one_more_write() -> None:
    kernel, _ = seconds("selective", "mlp_act")
    ours, run = seconds("selective", "mlp_act", software=MESHWRIGHT)
    mlp = run.model.blocks[0].mlp
    assert isinstance(mlp, MLPSpec)
    rate = run.device_costs.memory_efficiency["activation_backward"] * run.device_costs.bytes_per_s
    assert ours == pytest.approx(2 * mlp.width * run.microbatch_tokens / rate)
    assert ours < 0.4 * kernel  # that reads two and writes one, and is launched


def test_an_activation_without_a_gate_is_a_kernel_again_also_in_ours() -> None:
    plain, _ = seconds("selective", "mlp_act", model="gpt3-175b")
    assert seconds("selective", "mlp_act", software=MESHWRIGHT, model="gpt3-175b")[0] == plain


def test_experts_are_more_than_their_activation() -> None:
    act, _ = seconds("selective", "moe_act", model="mixtral-8x7b")
    whole, _ = seconds("selective", "moe", model="mixtral-8x7b")
    assert 0 < act < whole < seconds("full", model="mixtral-8x7b")[0]


def test_operations_that_a_block_lacks_cost_nothing() -> None:
    assert seconds("selective", "moe", "moe_act", "shared_experts", "mla_up_proj")[0] == 0


def test_an_operation_inside_another_is_counted_once() -> None:
    assert seconds("selective", "mlp", "mlp_act")[0] == seconds("selective", "mlp")[0]
    both, _ = seconds("selective", "moe", "moe_act", model="mixtral-8x7b")
    assert both == seconds("selective", "moe", model="mixtral-8x7b")[0]
