"""Patterns of products that run below what the device can do."""

import re

import msgspec
import numpy as np

from meshwright.observe.analyze.spans import COMPUTE
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import most_time, places, share, took

UNDERFILLED_NS = 5_000


def compute_capability(rank: Rank) -> int | None:
    """Major compute capability of the first device; None where the trace does not say."""
    return _property(rank, "computeMajor")


def device_bytes(rank: Rank) -> int | None:
    """Memory of the first device; None where the trace does not say."""
    return _property(rank, "totalGlobalMem")


def _property(rank: Rank, name: str) -> int | None:
    try:
        devices = msgspec.json.decode(rank.part.metadata.get("devices") or "[]")
    except msgspec.MsgspecError:
        return None
    first = devices[0] if isinstance(devices, list) and devices else {}
    said = first.get(name) if isinstance(first, dict) else None
    return said if isinstance(said, int) else None


@of_rank(
    Pattern(
        name="fp32-products",
        title="Products run in fp32",
        family="arithmetic",
        detected="products whose kernels are fp32 ones (of CUDA cores: sgemm, scudnn, simt, ffma; "
        "of AMD: Cijk_…_SB) on a device with tensor or matrix cores (compute capability 7 or more)",
        cost="estimated: half of their time; in 16 bits these cores do 4 to 16 times the FLOPs",
        remedy='torch.set_float32_matmul_precision("high") (TF32, from Ampere on), or '
        "torch.autocast(device_type='cuda', dtype=torch.bfloat16); for convolutions "
        "torch.backends.cudnn.allow_tf32 = True",
        rocm="torch.autocast(device_type='cuda', dtype=torch.bfloat16)",
        least_share=0.02,
    )
)
def fp32_products(rank: Rank) -> Hit | None:
    """Products that tensor cores could do."""
    own = rank.kernels("fp32 product")
    major = compute_capability(rank)
    if not own.any() or major is None or major < 7:
        return None
    spent = rank.alone_ns(own)
    remedy = ""
    if major < 8:
        scaled = " with torch.amp.GradScaler()" if rank.trains else ""
        remedy = (
            f"torch.autocast(device_type='cuda', dtype=torch.float16){scaled}: this device has "
            "fp16 tensor cores and no TF32"
        )
    evidence = (
        f"{took(spent)} in {int(own.sum())} fp32 products, {share(spent, rank.window_ns)} of the "
        f"time, on a device of compute capability {major}",
        *most_time(rank, own),
    )
    return Hit(spent / 2, evidence, places(rank, own), remedy)


@of_rank(
    Pattern(
        name="unaligned-products",
        title="Sizes of products do not suit tensor cores",
        family="arithmetic",
        detected="tensor-core products whose kernel is of alignment 1 or 2: a size of the factors "
        "is odd or no multiple of 4",
        cost="estimated: half of their time",
        remedy="pad sizes to multiples of 64: vocabulary 50257 -> 50304 "
        "(pad_to_multiple_of=64), sequence length, hidden and head sizes to multiples of 8",
        least_share=0.02,
    )
)
def unaligned_products(rank: Rank) -> Hit | None:
    """Products that load element by element."""
    own = rank.kernels("unaligned product")
    if not own.any():
        return None
    spent = rank.alone_ns(own)
    names = {rank.spans.names[code] for code in np.unique(rank.spans.name[own]).tolist()}
    found = {match[1] for name in names if (match := re.search(r"_align(\d)", name))}
    evidence = (
        f"{took(spent)} in {int(own.sum())} products of alignment {', '.join(sorted(found))}",
        *most_time(rank, own),
    )
    return Hit(spent / 2, evidence, places(rank, own))


@of_rank(
    Pattern(
        name="underfilled-device",
        title="Kernels have fewer blocks than the device has processors",
        family="arithmetic",
        detected="compute kernels of 5 µs and more with less than one block per multiprocessor",
        cost="measured: their time, times the part of the multiprocessors that has no block; what "
        "other streams fill of it is not known",
        remedy="larger micro-batches, or kernels that split more: split-K products",
        serving="larger batches, or kernels that split more: split-K products, flash-decoding "
        "(num_splits)",
        least_share=0.05,
    )
)
def underfilled_device(rank: Rank) -> Hit | None:
    """Small batches."""
    long = np.flatnonzero((rank.spans.kind == COMPUTE) & (rank.length >= UNDERFILLED_NS))
    blocks = rank.argument(rank.spans.row[long], "blocks per SM")
    few = long[blocks < 1]
    if not few.size:
        return None
    cost = float((rank.length[few] * (1 - blocks[blocks < 1])).sum())
    own = np.zeros(rank.length.size, dtype=np.bool_)
    own[few] = True
    evidence = (
        f"{few.size} kernels, {took(rank.length[few].sum())}, with "
        f"{np.median(blocks[blocks < 1]):.2g} blocks per multiprocessor (median)",
        *most_time(rank, own),
    )
    return Hit(cost, evidence, places(rank, own))
