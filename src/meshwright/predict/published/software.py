"""The software of a published run, from what its row says of the framework and the time.

Rows name no kernels. What is taken instead: half precision is the time before flash kernels;
FSDP is plain PyTorch; all else is Megatron and its kin, which since Hopper hide tensor-parallel
communication where the sequence is split.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.predict.software import EAGER, MEGATRON, MEGATRON_2021, Software
from meshwright.spec.cluster import Gpu
from meshwright.spec.layout import Layout


def software_of(row: Mapping[str, Any], layout: Layout, gpu: Gpu) -> Software:
    """Return the software that a row most likely ran."""
    if row.get("precision_class") == "fp16":
        return MEGATRON_2021
    sharding = str(row["layout"].get("zero_stage_or_distopt") or "").lower()
    if "fsdp" in sharding and "megatron" not in sharding:
        return EAGER
    overlaps = layout.sequence_parallel and gpu.arch >= "sm_90"
    return Software(tp_overlap=True) if overlaps else MEGATRON
