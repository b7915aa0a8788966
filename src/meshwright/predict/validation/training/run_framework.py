"""The software of a published run, from what its row says of the framework and the time.

Rows name no kernels. What is taken instead: half precision is the time before flash kernels;
sharding by FSDP or a ZeRO stage is PyTorch without fused kernels, unless eight-bit products tell
of Transformer Engine or a compiler; a distributed optimizer (or none) is Megatron and its kin,
which since Hopper hide tensor-parallel communication where the sequence is split.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from meshwright.predict.network.expert_dispatch import DispatcherKind
from meshwright.predict.network.nccl_constants import parse_sm
from meshwright.predict.training_run.training_framework import (
    EAGER,
    MEGATRON_2021,
    TrainingFramework,
)
from meshwright.spec.cluster import Gpu
from meshwright.spec.layout import Layout


def infer_framework(row: Mapping[str, Any], layout: Layout, gpu: Gpu) -> TrainingFramework:
    """Return the software that a row most likely ran."""
    sharding = str(row["layout"].get("zero_stage_or_distopt") or "").lower()
    plain = sharding.startswith(("fsdp ", "fsdp2", "zero")) or sharding == "fsdp"
    ungated = not (row.get("model") or {}).get("ffn_gated")
    if row.get("precision_class") == "fp16" or (plain and ungated and layout.zero < 2):
        if plain and layout.zero == 3:
            return TrainingFramework(
                attention="unfused", fusion="eager", prefetch_sharded_params=False
            )
        return replace(MEGATRON_2021, **DEEPSPEED) if plain else MEGATRON_2021
    if plain and ungated:
        return replace(EAGER, attention="flash1", fusion="native")
    if plain and row.get("precision_class") == "bf16" and not row["model"].get("experts"):
        return EAGER
    return TrainingFramework(
        tp_overlap=layout.sequence_parallel and _is_recent(gpu),
        cuda_graphs=gpu.name.startswith("gb"),
        dispatcher=_dispatcher(row, gpu),
        fused_experts=_release(row) >= FUSED_EXPERTS_RELEASE,
        # Current scaling is named where it is used; before, Transformer Engine delayed it.
        delayed_scaling=not re.search("cs|wise", str(row.get("precision"))),
    )


DEEPSPEED: dict[str, Any] = {
    "fusion": "eager",
    "tp_async": False,
    "fused_accumulation": False,
    "overlap_exchange": False,
    "rng_state_sync": True,
}
"""What Megatron under DeepSpeed's engine lacks."""
FUSED_EXPERTS_RELEASE = (26, 6)
"""Release of NVIDIA's containers from which experts run in fused kernels (year and month)."""


def _release(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return the year and month of the software, where the row's source prints them."""
    found = re.search(r"\b(2\d)\.(0[1-9]|1[0-2])\b", str(row.get("source") or ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _is_recent(gpu: Gpu) -> bool:
    """Hopper or newer."""
    return (parse_sm(gpu.arch) or 0) >= 90


def _dispatcher(row: Mapping[str, Any], gpu: Gpu) -> DispatcherKind:
    named = row["layout"].get("dispatcher")
    if named is None:
        return "deepep" if _is_recent(gpu) else "alltoall"
    return "alltoall" if "alltoall" in str(named) else "deepep"
