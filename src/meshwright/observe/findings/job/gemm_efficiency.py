"""Patterns of GEMMs that run below what the device can do."""

import re

import numpy as np

from meshwright.observe.analyze.spans.intervals import COMPUTE
from meshwright.observe.findings.job.evidence_format import (
    format_top_kernels,
    select_longest_device_spans,
)
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.observe.findings.text_format import format_duration, format_share

MIN_KERNEL_NS = 5_000


@detects_on_rank(
    Pattern(
        name="fp32-gemms",
        title="GEMMs run in fp32",
        family="gemm",
        rule="GEMMs whose kernels are fp32 ones (of CUDA cores: sgemm, scudnn, simt, ffma; "
        "of AMD: Cijk_…_SB) on a device with tensor or matrix cores (compute capability 7 or more)",
        cost_basis="estimated: half of their time; in 16 bits these cores do 4 to 16 times the "
        "FLOPs",
        remedy='torch.set_float32_matmul_precision("high") (TF32, from Ampere on), or '
        "torch.autocast(device_type='cuda', dtype=torch.bfloat16); for convolutions "
        "torch.backends.cudnn.allow_tf32 = True",
        rocm_remedy="torch.autocast(device_type='cuda', dtype=torch.bfloat16)",
        min_cost=0.02,
    )
)
def detect_fp32_gemms(rank: RankContext) -> Detection | None:
    """GEMMs that tensor cores could do."""
    own = rank.match_kernels("fp32 gemm")
    major = rank.find_compute_capability()
    if not own.any() or major is None or major < 7:
        return None
    spent = rank.measure_uncontended_ns(own)
    remedy = ""
    if major < 8:
        scaled = " with torch.amp.GradScaler()" if rank.is_training else ""
        remedy = (
            f"torch.autocast(device_type='cuda', dtype=torch.float16){scaled}: this device has "
            "fp16 tensor cores and no TF32"
        )
    evidence = (
        f"{format_duration(spent)} in {int(own.sum())} fp32 GEMMs, "
        f"{format_share(spent, rank.window_ns)} of the "
        f"time, on a device of compute capability {major}",
        *format_top_kernels(rank, own),
    )
    return Detection(spent / 2, evidence, select_longest_device_spans(rank, own), remedy)


@detects_on_rank(
    Pattern(
        name="misaligned-gemms",
        title="GEMM sizes are not aligned for tensor cores",
        family="gemm",
        rule="tensor-core GEMMs whose kernel is of alignment 1 or 2: a size of the factors "
        "is odd or no multiple of 4",
        cost_basis="estimated: half of their time",
        remedy="pad sizes to multiples of 64: vocabulary 50257 -> 50304 "
        "(pad_to_multiple_of=64), sequence length, hidden and head sizes to multiples of 8",
        min_cost=0.02,
    )
)
def detect_misaligned_gemms(rank: RankContext) -> Detection | None:
    """GEMMs that load element by element."""
    own = rank.match_kernels("misaligned gemm")
    if not own.any():
        return None
    spent = rank.measure_uncontended_ns(own)
    names = {rank.spans.names[code] for code in np.unique(rank.spans.name[own]).tolist()}
    found = {match[1] for name in names if (match := re.search(r"_align(\d)", name))}
    evidence = (
        f"{format_duration(spent)} in {int(own.sum())} GEMMs of alignment "
        f"{', '.join(sorted(found))}",
        *format_top_kernels(rank, own),
    )
    return Detection(spent / 2, evidence, select_longest_device_spans(rank, own))


@detects_on_rank(
    Pattern(
        name="small-grid",
        title="Kernels have fewer blocks than the device has processors",
        family="gemm",
        rule="compute kernels of 5 µs and more with less than one block per multiprocessor",
        cost_basis="measured: their time, times the part of the multiprocessors that has no block; "
        "what "
        "other streams fill of it is not known",
        remedy="larger micro-batches, or kernels that split more: split-K GEMMs",
        serving_remedy="larger batches, or kernels that split more: split-K GEMMs, "
        "flash-decoding (num_splits)",
        min_cost=0.05,
    )
)
def detect_small_grids(rank: RankContext) -> Detection | None:
    """Small batches."""
    long = np.flatnonzero((rank.spans.kind == COMPUTE) & (rank.duration_ns >= MIN_KERNEL_NS))
    blocks = rank.read_argument(rank.spans.row[long], "blocks per SM")
    few = long[blocks < 1]
    if not few.size:
        return None
    cost = float((rank.duration_ns[few] * (1 - blocks[blocks < 1])).sum())
    own = np.zeros(rank.duration_ns.size, dtype=np.bool_)
    own[few] = True
    evidence = (
        f"{few.size} kernels, {format_duration(rank.duration_ns[few].sum())}, with "
        f"{np.median(blocks[blocks < 1]):.2g} blocks per multiprocessor (median)",
        *format_top_kernels(rank, own),
    )
    return Detection(cost, evidence, select_longest_device_spans(rank, own))
