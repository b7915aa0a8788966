"""The software of a published run, from what its row says of the framework and the time.

Rows name no kernels. What is taken instead: half precision is the time before flash kernels;
sharding by FSDP or a ZeRO stage is PyTorch without fused kernels, unless eight-bit products tell
of Transformer Engine or a compiler; a distributed optimizer (or none) is Megatron and its kin,
which since Hopper hide tensor-parallel communication where the sequence is split.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.predict.software import EAGER, MEGATRON, MEGATRON_2021, Software
from meshwright.spec.cluster import Gpu
from meshwright.spec.layout import Layout


def software_of(row: Mapping[str, Any], layout: Layout, gpu: Gpu) -> Software:
    """Return the software that a row most likely ran."""
    sharding = str(row["layout"].get("zero_stage_or_distopt") or "").lower()
    plain = sharding.startswith(("fsdp", "zero"))
    if row.get("precision_class") == "fp16":
        return Software(attention=None, fusion="eager") if plain else MEGATRON_2021
    if plain and row.get("precision_class") == "bf16":
        return EAGER
    overlaps = layout.sequence_parallel and gpu.arch >= "sm_90"
    return Software(tp_overlap=True) if overlaps else MEGATRON
