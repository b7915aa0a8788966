"""What each target must be able to say: without this the round-trip law could hold by silence."""

from typing import Any

import pytest

from meshwright.spec.bridge import BRIDGES
from meshwright.spec.bridge.spec_diff import diff_layouts
from meshwright.spec.layout.layout import Layout

STATES = ("gradients", "optimizer", "parameters")
BF16 = {"master_precision": "none", "gradient_precision": "bf16", "moment_precision": "bf16"}
MCORE: list[dict[str, Any]] = [
    {"tp": 8, "sequence_parallel": True, "overlap_tp": True, "dp": 4, "zero": 1},
    {"tp": 2, "cp": 4, "cp_kind": "ulysses", "dp": 2, "zero": 1},
    {"cp": 4, "cp_kind": "allgather", "dp": 2},
    {"cp": 4, "cp_kind": "ring+ulysses", "dp": 2},
    {"pp": 4, "virtual_stages": 3, "schedule": "interleaved"},
    {"pp": 4, "overlap_pp": False},
    {"pp": 4, "virtual_stages": 2, "schedule": "interleaved", "overlap_pp": False},
    {"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "stage_layers": (3, 5, 0, 8)},
    {"pp": 4, "overlap_pp": False, "stage_layers": (7, 8, 8, 7)},
    {"dp": 16, "zero": 1, "shard": 4},
    {"dp": 8, "zero": 2},
    {"dp": 8, "zero": 3, "shard": 4},
    {"tp": 4, "dp": 8, "ep": 8, "expert_tp": 1, "zero": 1, "overlap_ep": True},
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 3},
    {"recompute": "selective", "recompute_ops": ("core_attn", "layernorm", "moe_act")},
    {"precision": "fp32", "master_precision": "none"},
    {"precision": "fp16", "gradient_precision": "fp16"},
    {"precision": "fp16"},
    {"precision": "fp8-tensorwise"},
    {"precision": "fp8-blockwise", "gradient_precision": "bf16"},
    {"precision": "mxfp8"},
    {"precision": "nvfp4"},
    {"dp": 2, "zero": 1, "moment_precision": "fp8", "master_precision": "fp16"},
    {"dp": 2, "zero": 1, "offload": ("optimizer",)},
    {"optimizer": "muon"},
    {"optimizer": "lion"},
    {"optimizer": "sgd"},
    {"dp": 4, "microbatch": 2, "global_batch": 64},
    {"pp": 2, "dp": 2, "order": "tp-cp-ep-pp-dp", "overlap_pp": False},
    {"dp": 4, "overlap_gradients": False},
    {"dp": 4, "zero": 1, "overlap_parameters": False},
]
SAYS: dict[str, list[dict[str, Any]]] = {
    "megatron": MCORE,
    "nemo": MCORE,
    "torchtitan": [
        {"dp": 8, "zero": 3},
        {"dp": 8, "zero": 2},
        {"dp": 8, "zero": 3, "shard": 4},
        {"dp": 8},
        {"tp": 8, "sequence_parallel": True, "overlap_tp": True, "dp": 2, "zero": 3},
        {"cp": 2, "dp": 2, "zero": 3},
        {"cp": 2, "dp": 2, "zero": 3, "cp_kind": "allgather"},
        {"pp": 4, "global_batch": 8, "schedule": "gpipe"},
        {"pp": 4, "global_batch": 8},
        {"pp": 4, "global_batch": 8, "virtual_stages": 2, "schedule": "interleaved"},
        {"pp": 4, "global_batch": 8, "virtual_stages": 2, "schedule": "zb-v"},
        {"pp": 2, "global_batch": 8, "stage_layers": (7, 9), "dp": 2, "zero": 3},
        {"pp": 2, "global_batch": 8, "virtual_stages": 2, "schedule": "dualpipe-v", "dp": 2,
         "ep": 2, "overlap_ep": True, "zero": 2},
        {"dp": 8, "ep": 4, "zero": 3},
        {"tp": 2, "sequence_parallel": True, "dp": 4, "ep": 8, "expert_tp": 1, "zero": 3},
        {"recompute": "full"},
        {"recompute": "selective", "recompute_ops": ("layernorm", "mlp_act")},
        {"precision": "fp32", "master_precision": "none"},
        {"precision": "fp8-tensorwise"},
        {"precision": "fp8-rowwise"},
        {"precision": "mxfp8"},
        BF16,
        {"dp": 2, "zero": 3, "offload": STATES},
        {"dp": 4, "microbatch": 2, "global_batch": 64},
    ],
    "deepspeed": [
        {"dp": 8, "zero": 1, "overlap_parameters": False},
        {"dp": 8, "zero": 2, "overlap_parameters": False, "overlap_gradients": False},
        {"dp": 8, "zero": 3},
        {"dp": 8, "zero": 3, "overlap_parameters": False},
        {"dp": 8, "zero": 3, "shard": 4},
        {"tp": 4, "dp": 2, "zero": 3, "overlap_tp": True},
        {"cp": 4, "cp_kind": "ulysses", "dp": 2, "zero": 3},
        {"dp": 8, "ep": 4, "zero": 2, "overlap_parameters": False},
        {"precision": "fp32", "master_precision": "none"},
        {"precision": "fp16", "gradient_precision": "fp16", "dp": 2, "zero": 3},
        {"dp": 2, "zero": 3, "gradient_precision": "bf16"},
        {"dp": 2, "zero": 3, "gradient_precision": "bf16", "master_precision": "bf16",
         "moment_precision": "bf16"},
        {"dp": 2, "zero": 3, "optimizer": "muon"},
        {"dp": 2, "zero": 3, "optimizer": "sgd"},
        {"dp": 2, "zero": 3, "offload": STATES},
        {"dp": 4, "zero": 3, "microbatch": 2, "global_batch": 64},
    ],
    "fsdp2": [
        {"dp": 8, "zero": 3},
        {"dp": 8, "zero": 2},
        {"dp": 8},
        {"dp": 8, "zero": 3, "shard": 4},
        {"cp": 2, "dp": 4, "zero": 3},
        {"cp": 2, "dp": 4, "zero": 3, "cp_kind": "allgather"},
        {"tp": 4, "dp": 4, "zero": 3},
        {"tp": 4, "dp": 4, "zero": 3, "order": "ep-dp-tp-cp-pp"},
        {"recompute": "full"},
        {"precision": "fp32", "master_precision": "none"},
        {"precision": "fp16"},
        BF16,
        {"optimizer": "sgd"},
        {"optimizer": "muon"},
        {"dp": 2, "zero": 3, "offload": STATES},
        {"dp": 4, "microbatch": 2, "global_batch": 64},
    ],
}  # fmt: skip
CASES = [(name, fields) for name, cases in SAYS.items() for fields in cases]


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_the_target_says_it_all(name: str, fields: dict[str, Any]) -> None:
    layout = Layout(**fields)
    if name == "deepspeed" and not layout.zero:
        layout = Layout(**{"dp": 2, "zero": 3, **fields})
    exported = BRIDGES[name].export_config(layout)
    assert exported.unexpressed == ()
    back = BRIDGES[name].import_config(exported.text, gpus=layout.gpus)
    assert diff_layouts(layout, back.layout) == ()


@pytest.mark.parametrize(
    ("name", "field", "fields"),
    [
        ("megatron", "precision", {"precision": "fp8-rowwise"}),
        ("megatron", "schedule", {"pp": 4, "schedule": "zb-h1"}),
        ("megatron", "overlap_pp", {"pp": 4}),
        ("megatron", "offload", {"offload": ("parameters",)}),
        ("megatron", "recompute_ops", {"recompute": "selective", "recompute_ops": ("mlp_act",)}),
        ("megatron", "moment_precision", {"moment_precision": "int8"}),
        ("megatron", "zero", {"dp": 2, "zero": 3, "optimizer": "muon"}),
        ("nemo", "order", {"tp": 2, "dp": 2, "order": "dp-tp-cp-ep-pp"}),
        ("torchtitan", "schedule", {"pp": 4, "global_batch": 8, "schedule": "zb-h1"}),
        ("torchtitan", "zero", {"dp": 2, "zero": 1}),
        ("torchtitan", "optimizer", {"optimizer": "muon"}),
        ("torchtitan", "ep", {"dp": 8, "zero": 3, "shard": 2, "ep": 8}),
        ("deepspeed", "pp", {"pp": 2}),
        ("deepspeed", "precision", {"precision": "mxfp8"}),
        ("deepspeed", "recompute", {"recompute": "full"}),
        ("deepspeed", "sequence_parallel", {"tp": 2, "sequence_parallel": True}),
        ("fsdp2", "ep", {"dp": 8, "ep": 8}),
        ("fsdp2", "schedule", {"pp": 2, "schedule": "gpipe"}),
    ],
)
def test_what_the_target_cannot_say_is_listed(
    name: str, field: str, fields: dict[str, Any]
) -> None:
    exported = BRIDGES[name].export_config(Layout(**fields))
    assert f"layout.{field}" in {problem.where for problem in exported.unexpressed}
