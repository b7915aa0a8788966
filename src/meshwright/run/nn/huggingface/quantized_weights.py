"""Weights that checkpoints hold in eight or four bits, back to numbers one can multiply with.

fp8    DeepSeek-V3 (arXiv 2412.19437, section 3.3): e4m3 with one fp32 scale per 128×128 block, kept
       beside the weight as `weight_scale_inv`; the weight is the product of the two. Others keep
       `weight_scale`, one number for the tensor or for each row.
mxfp4  OCP Microscaling Formats 1.0: 32 e2m1 numbers share a power of two. gpt-oss packs two
       numbers in a byte, the first in the low half, as `…_blocks`, with the biased exponents in
       `…_scales`.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 128
"""Side of a square block that shares one scale, unless the config says otherwise."""

E4M3_MAX = 448.0
"""Largest number of e4m3 without infinities (OCP 8-bit floating point, table 1)."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of e2m1 without sign (OCP Microscaling Formats 1.0, table 5)."""
_EXPONENT_BIAS = 127
_ROWS = 128
"""Rows unpacked at once: few enough for a processor's caches."""


def dequantize_fp8(
    weight: Tensor, scale: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> Tensor:
    """Multiply an fp8 weight with its scales: one per block, one per row, or one in all."""
    scale = scale.float()
    if tuple(scale.shape) != get_block_scale_shape(weight.shape, block):
        return weight.float().mul_(scale.reshape(-1, *[1] * (weight.dim() - 1)))
    rows, columns = block
    numbers = torch.empty(weight.shape, device=weight.device)
    # Row by row of blocks, so that what passes stays in a processor's caches.
    for index, each in enumerate(scale.repeat_interleave(columns, 1)[:, : weight.shape[1]]):
        part = slice(index * rows, (index + 1) * rows)
        numbers[part].copy_(weight[part]).mul_(each)
    return numbers


def get_block_scale_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix cut into blocks; the last blocks may be short."""
    return tuple(-(-size // side) for size, side in zip(shape, block, strict=False))


def is_scale_shape_valid(
    shape: Sequence[int], scale: Sequence[int], block: tuple[int, int]
) -> bool:
    """Tell whether scales are one per block, one per row, or one in all."""
    return tuple(scale) == get_block_scale_shape(shape, block) or math.prod(scale) in {1, shape[0]}


def quantize_fp8(weight: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[Tensor, Tensor]:
    """Round a matrix to e4m3, the largest of each block to the largest there is; add the scales."""
    rows, columns = block
    height, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    most = blocks.abs().amax(dim=(1, 3), keepdim=True)
    # A block of zeros takes any scale; one keeps the quotient finite.
    scale = torch.where(most > 0, most / E4M3_MAX, torch.ones_like(most))
    small = (blocks / scale).to(torch.float8_e4m3fn)
    whole = small.view(torch.uint8).flatten(2, 3).flatten(0, 1)[:height, :width].contiguous()
    return whole.view(torch.float8_e4m3fn), scale[:, 0, :, 0].contiguous()


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack `blocks[expert, out, in/32, 16]` into `[expert, in, out]`, as gpt-oss stores bf16.

    Every result is exact in bf16: a one-bit fraction times a power of two.
    """
    experts, out, groups, half = blocks.shape
    shape = (experts * out, groups, half * 2)
    numbers = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    pairs = _pairs().to(blocks.device)
    for rows, packed, exponents in zip(
        numbers.split(_ROWS),
        blocks.flatten(0, 1).split(_ROWS),
        scales.flatten(0, 1).split(_ROWS),
        strict=True,
    ):
        found = pairs.index_select(0, packed.flatten().int()).view(torch.bfloat16)
        power = torch.exp2((exponents.int() - _EXPONENT_BIAS).float()).bfloat16()
        torch.mul(found.view(rows.shape), power[..., None], out=rows)
    return numbers.view(experts, out, -1).transpose(1, 2)


def _pairs() -> Tensor:
    """Return the two bf16 numbers each byte stands for, side by side in 32 bits."""
    numbers = torch.tensor((*_E2M1, *(-number for number in _E2M1)), dtype=torch.bfloat16)
    codes = torch.arange(256)
    return torch.stack([numbers[codes & 0xF], numbers[codes >> 4]], -1).view(torch.int32).flatten()
