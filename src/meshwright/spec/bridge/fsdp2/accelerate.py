"""Accelerate's YAML, where it sets up FSDP2 (`fsdp_config: {fsdp_version: 2}`): read only.

Keys are those of src/accelerate/commands/config/cluster.py and src/accelerate/parallelism_config.py
in the Accelerate repository, July 2026.
"""

import re
from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.spec.bridge.export_report import read_layout
from meshwright.spec.bridge.format_detection import ExpectedFormat, read_table
from meshwright.spec.bridge.framework_bridge import ImportedConfig
from meshwright.spec.bridge.framework_config import FrameworkConfig, classify_unread, flatten
from meshwright.spec.bridge.fsdp2.fully_shard_config import HOST_STATES
from meshwright.spec.layout.choices import Precision
from meshwright.spec.layout.layout import Layout

_KEYS = """
    num_processes mixed_precision gradient_accumulation_steps
    fsdp_config.fsdp_version fsdp_config.fsdp_reshard_after_forward
    fsdp_config.fsdp_sharding_strategy fsdp_config.fsdp_offload_params
    fsdp_config.fsdp_activation_checkpointing
    parallelism_config.parallelism_config_dp_replicate_size
    parallelism_config.parallelism_config_dp_shard_size
    parallelism_config.parallelism_config_tp_size
    parallelism_config.parallelism_config_cp_size
    parallelism_config.parallelism_config_cp_comm_strategy
"""
KEYS = tuple(_KEYS.split())
IGNORED = re.compile(
    r"(?:compute_environment|debug|distributed_type|downcast_bf16|enable_cpu_affinity|"
    r"machine_rank|main_\w+|num_machines|rdzv_\w+|same_network|tpu_\w+|use_cpu|gpu_ids|"
    r"dynamo_config.*|fsdp_config\.\w+|parallelism_config\.\w+|fp8_config.*)"
)
EXPECTED_FORMAT = ExpectedFormat(
    "fsdp2", "FSDP2 settings", "give Accelerate's YAML with an fsdp_config"
)
_OTHERS = {
    "DEEPSPEED": "import DeepSpeed's JSON with --from deepspeed",
    "MEGATRON_LM": "import Megatron-LM's flags with --from megatron",
}
_PRECISIONS: dict[str, Precision] = {
    "no": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8-tensorwise",
}
_STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
    "true": 3,
    "True": 3,
    "false": 2,
    "False": 2,
}


def is_accelerate_config(given: str | Mapping[str, Any]) -> bool:
    """Tell whether this is Accelerate's file rather than a snippet."""
    if isinstance(given, Mapping):
        return "fsdp_config" in given or "distributed_type" in given
    return re.search(r"(?m)^\s*\"?(?:fsdp_config|distributed_type)\"?\s*:", given) is not None


def import_config(given: str | Mapping[str, Any], *, gpus: int | None = None) -> ImportedConfig:
    """Read a configuration; it holds no model."""
    data = read_table(given, ".yaml", "config", EXPECTED_FORMAT)
    engine = str(data.get("distributed_type", "FSDP")).upper()
    if engine in _OTHERS and "fsdp_config" not in data:
        what = f"{engine} is set up there, not FSDP2"
        raise InputError([Problem("distributed_type", what, _OTHERS[engine])])
    flat = flatten(data)
    settings = FrameworkConfig(flat, KEYS)
    found = classify_unread(flat, settings, IGNORED, "Accelerate key", cutoff=0.9, real=frozenset())
    layout = _read(settings, gpus)
    return ImportedConfig(layout=layout, ignored=found.ignored, unknown=tuple(settings.notes))


def _read(settings: FrameworkConfig, gpus: int | None) -> Layout:
    part = "parallelism_config.parallelism_config_"
    tp = settings.integer(f"{part}tp_size", 1)
    cp = settings.integer(f"{part}cp_size", 1)
    replicas = settings.integer(f"{part}dp_replicate_size", 1)
    gpus = gpus if gpus is not None else settings.integer("num_processes", 1)
    shard = settings.optional_integer(f"{part}dp_shard_size")
    if shard is None:
        shard = max(1, gpus // (tp * cp * replicas))
    if shard * replicas * tp * cp != gpus:
        settings.add_problem(
            "num_processes", f"the degrees make {shard * replicas * tp * cp} GPUs, not {gpus}",
            "change a size or the number of processes",
        )  # fmt: skip
    strategy = settings.choice("fsdp_config.fsdp_sharding_strategy", _STRATEGIES, 3)
    zero = settings.choice("fsdp_config.fsdp_reshard_after_forward", _STRATEGIES, strategy)
    if settings.integer("fsdp_config.fsdp_version", 1) != 2:
        settings.add_note("fsdp_config.fsdp_version", "FSDP1 is read as if it were FSDP2")
    plain: Precision = "fp32"
    precision = settings.choice("mixed_precision", _PRECISIONS, plain)
    kinds = {"allgather": "allgather", "alltoall": "ring"}
    kind = settings.choice(f"{part}cp_comm_strategy", kinds, "allgather")
    recompute = settings.flag("fsdp_config.fsdp_activation_checkpointing")
    offload = settings.flag("fsdp_config.fsdp_offload_params")
    steps = settings.optional_integer("gradient_accumulation_steps")
    settings.raise_problems()
    fields = {
        "tp": tp,
        "cp": cp,
        "cp_kind": "allgather" if cp > 1 and kind == "allgather" else "ring",
        "dp": replicas * shard,
        "shard": shard * cp if replicas > 1 and zero else None,
        "zero": zero,
        "recompute": "full" if recompute else "none",
        "precision": precision,
        "master_precision": "none" if precision == "fp32" else "fp32",
        "offload": HOST_STATES if offload else (),
        "global_batch": replicas * shard * steps if steps is not None else None,
    }
    return read_layout(fields, {})
