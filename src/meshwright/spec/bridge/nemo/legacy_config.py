"""NeMo 1 and NeMo 2 configurations, put into Megatron-Bridge's fields.

NeMo 1 keeps everything under `model:` (examples/nlp/language_modeling/conf/megatron_gpt_config.yaml
and its neighbours); NeMo 2 keeps degrees under `trainer.strategy`, batch sizes under `data`, sizes
under `model.config` (nemo/collections/llm/recipes/CONFIGURATION-HIERARCHY.md). Both are in the NeMo
repository. What the fields mean is not known here.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.errors import Problem
from meshwright.spec.bridge.nemo.recipe_fields import OVERLAP_PATHS, PATHS
from meshwright.spec.serialization import format_value

_SIGNS = re.compile(
    r"(?:trainer|exp_manager|data|optim|model\.config|model\.optim|model\.data)\..*"
    r"|model\.(?:micro_batch_size|global_batch_size|encoder_seq_length)"
)

_DEGREES = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size sequence_parallel expert_model_parallel_size expert_tensor_parallel_size
"""
_DDP = """
    use_distributed_optimizer overlap_grad_reduce overlap_param_gather grad_reduce_in_fp32
    num_distributed_optimizer_instances data_parallel_sharding_strategy
"""
RENAMED = {
    "model.micro_batch_size": "train.micro_batch_size",
    "model.global_batch_size": "train.global_batch_size",
    "model.rampup_batch_size": "train.rampup_batch_size",
    "model.encoder_seq_length": "dataset.seq_length",
    "model.data.seq_length": "dataset.seq_length",
    "model.max_position_embeddings": "model.seq_length",
    "model.activations_checkpoint_granularity": "model.recompute_granularity",
    "model.activations_checkpoint_method": "model.recompute_method",
    "model.activations_checkpoint_num_layers": "model.recompute_num_layers",
    "model.bias": "model.add_bias_linear",
    "model.qkv_bias": "model.add_qkv_bias",
    "model.rotary_percentage": "model.rotary_percent",
    "model.override_vocab_size": "model.vocab_size",
    "model.ub_tp_comm_overlap": "model.tp_comm_overlap",
    "model.optim.overlap_grad_sync": "ddp.overlap_grad_reduce",
    "model.optim.overlap_param_sync": "ddp.overlap_param_gather",
    "data.micro_batch_size": "train.micro_batch_size",
    "data.global_batch_size": "train.global_batch_size",
    "data.rampup_batch_size": "train.rampup_batch_size",
    "data.seq_length": "dataset.seq_length",
    **{f"trainer.strategy.{name}": f"model.{name}" for name in _DEGREES.split()},
    **{f"trainer.strategy.ddp.{name}": f"ddp.{name}" for name in _DDP.split()},
    "optim.config.use_distributed_optimizer": "ddp.use_distributed_optimizer",
    **{
        f"optim.config.{path.removeprefix('optimizer.')}": path
        for path in PATHS.values()
        if path.startswith("optimizer.")
    },
    **{
        f"model.config.{path.removeprefix('model.')}": path
        for path in PATHS.values()
        if path.startswith("model.")
    },
}
"""Older field → Megatron-Bridge's."""

DEFAULTS: Mapping[str, Any] = {
    "ddp.use_distributed_optimizer": False,
    "ddp.overlap_grad_reduce": False,
    "ddp.overlap_param_gather": False,
    "model.should_pad_vocab": True,
}
"""What an older file means by leaving a field out, unlike a recipe of Megatron-Bridge."""

IGNORED = re.compile(
    r"(?:trainer|exp_manager|data|optim|log|resume|run|name|restore_from_path|hydra|defaults)"
    r"(?:\..*)?|model\.(?:config|data|optim|tokenizer|nsys_profile)(?:\..*)?"
)
"""What older files hold besides, none of it about a layout."""

_READ = """
    trainer.devices trainer.num_nodes trainer.precision trainer.plugins.precision
    trainer.plugins.grad_reduce_in_fp32 trainer.plugins.fp8 trainer.plugins.fp8_recipe
    trainer.callbacks trainer.plugins model.fp8 model.fp8_e4m3 model.fp8_hybrid model.optim.name
    model.optim.grad_sync_dtype
"""
READ_FIELDS = frozenset(_READ.split())
"""Fields that are read here and have no one counterpart."""

NEIGHBOURS = frozenset({"model.fp8_params"})
"""A real field whose name comes close to one of the table."""

_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "geglu": ("gelu", True),
    "swiglu": ("silu", True),
    "reglu": ("relu", True),
    "squared-relu": ("squared_relu", False),
}
_NORMS: dict[str, dict[str, Any]] = {
    "layernorm": {"model.normalization": "LayerNorm"},
    "low_precision_layernorm": {"model.normalization": "LayerNorm"},
    "layernorm1p": {
        "model.normalization": "LayerNorm", "model.layernorm_zero_centered_gamma": True},
    "rmsnorm": {"model.normalization": "RMSNorm"},
}  # fmt: skip
_PRECISIONS = {"bf16": "bf16", "16": "fp16", "fp16": "fp16", "32": "fp32", "fp32": "fp32"}
_REFERENCE = re.compile(r"\$\{(\.?)([\w.]+)\}")


class ConvertedConfig(NamedTuple):
    """An older configuration in Megatron-Bridge's fields."""

    flat: dict[str, Any]
    """Fields by dotted path; what has no counterpart keeps its own."""
    origin: dict[str, str]
    """Where a field stood, for errors."""
    gpus: int | None
    """Devices × nodes, where the trainer says both."""
    notes: tuple[Problem, ...]
    """What was read with a reserve."""


def is_legacy(flat: Mapping[str, Any]) -> bool:
    """Tell whether a configuration is NeMo's rather than Megatron-Bridge's."""
    return any(_SIGNS.fullmatch(path) for path in flat)


def convert_legacy(given: Mapping[str, Any]) -> ConvertedConfig:
    """Translate an older configuration, and write out what it means by leaving fields out."""
    flat = _resolved(_unlisted(given))
    fields: dict[str, Any] = dict(DEFAULTS)
    origin: dict[str, str] = {}
    for path, value in flat.items():
        if isinstance(value, str) and (value == "???" or _REFERENCE.search(value)):
            continue  # to be given at the launch, or pointing at what is not there
        new = RENAMED.get(path, path)
        if value is not None or new not in fields:
            fields[new] = value
        if new != path:
            origin[new] = path
    _shape(fields)
    _optimizer(fields, flat)
    notes = _precision(fields, flat)
    return ConvertedConfig(fields, origin, _gpus(flat), notes)


def _unlisted(given: Mapping[str, Any]) -> dict[str, Any]:
    """Take callbacks and plugins out of their lists; the names in them do not clash."""
    flat = dict(given)
    for section in ("trainer.callbacks", "trainer.plugins"):
        items = flat.get(section)
        for item in items if isinstance(items, list | tuple) else ():
            if isinstance(item, Mapping):
                flat |= {f"{section}.{key}": value for key, value in item.items()}
    for path in OVERLAP_PATHS.values():
        value = flat.pop(path.replace("comm_overlap", "trainer.callbacks", 1), None)
        if value is not None:
            flat[path] = value
    return flat


def _resolved(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Follow `${model.encoder_seq_length}` and `${.neighbour}`, which are how these files refer."""

    def follow(path: str, value: Any) -> Any:
        for _ in range(4):
            match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                return value
            section = path.rpartition(".")[0] if match[1] else ""
            path = f"{section}.{match[2]}" if section else match[2]
            if path not in flat:
                return value
            value = flat[path]
        return value

    return {path: follow(path, value) for path, value in flat.items()}


def _shape(fields: dict[str, Any]) -> None:
    """Turn NeMo's words for activation and norm into Megatron-Core's."""
    activation = fields.pop("model.activation", None)
    if isinstance(activation, str):
        function, gated = _ACTIVATIONS.get(activation.removeprefix("fast-"), (activation, False))
        fields |= {"model.activation_func": function, "model.gated_linear_unit": gated}
    norm = fields.get("model.normalization")
    if isinstance(norm, str):
        fields |= _NORMS.get(norm.lower(), {})


def _optimizer(fields: dict[str, Any], flat: Mapping[str, Any]) -> None:
    """Read the optimizer of NeMo 1, whose name says whether its states are sharded."""
    name = flat.get("model.optim.name")
    if not isinstance(name, str):
        return
    apex = name == "distributed_fused_adam"
    fields["ddp.use_distributed_optimizer"] = apex or name == "mcore_distributed_optim"
    if apex and "model.optim.overlap_grad_sync" not in flat:
        fields["ddp.overlap_grad_reduce"] = True  # the default of Apex's DistributedFusedAdam
    if "model.optim.grad_sync_dtype" in flat:
        fields["ddp.grad_reduce_in_fp32"] = str(flat["model.optim.grad_sync_dtype"]) == "fp32"
    if name == "sgd":
        fields["optimizer.optimizer"] = "sgd"


def _precision(fields: dict[str, Any], flat: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Write the precision section; one that is not said, or not known, is left to the default."""
    keys = ("trainer.plugins.precision", "trainer.precision")
    key = next((key for key in keys if flat.get(key)), None)
    if key is None:
        if any(path.startswith(("mixed_precision", "model.bf16", "model.fp16")) for path in flat):
            return ()
        what = "the precision is not given; bf16 is read"
        return (Problem(keys[1], what, f"give {keys[1]}"),)
    word = str(flat[key]).lower()
    half = _PRECISIONS.get(re.sub(r"-(?:mixed|true)$", "", word))
    if half is None:
        what = f"{format_value(flat[key])} is not known; bf16 is read"
        return (Problem(key, what, "use bf16-mixed, 16-mixed or 32"),)
    if half == "fp32":
        fields["mixed_precision"] = None
        return ()
    says: dict[str, Any] = {half: True}
    if "trainer.plugins.grad_reduce_in_fp32" in flat:
        says["grad_reduce_in_fp32"] = flat["trainer.plugins.grad_reduce_in_fp32"]
    fp8 = flat.get("trainer.plugins.fp8")
    if flat.get("model.fp8") is True:
        fp8 = "e4m3" if flat.get("model.fp8_e4m3") else "hybrid"
    if fp8:
        says |= {"fp8": fp8, "fp8_recipe": flat.get("trainer.plugins.fp8_recipe") or "delayed"}
    fields |= {f"mixed_precision.{name}": value for name, value in says.items()}
    return ()


def _gpus(flat: Mapping[str, Any]) -> int | None:
    devices, nodes = flat.get("trainer.devices"), flat.get("trainer.num_nodes", 1)
    sound = type(devices) is int and type(nodes) is int and 0 < devices <= 10**6
    return devices * nodes if sound and 0 < nodes <= 10**6 else None
