"""Eight bits for each optimizer moment: a code per element, a float32 scale per 256 elements.

The scale is the largest magnitude of the block. A code is a float of eight bits, cut out of the
bits of value / scale, so that coding takes a few integer operations, and no root or logarithm:

- first moment: a sign, four bits of exponent, three of mantissa; the smallest go evenly to zero;
- second moment, which is never negative: five bits of exponent and three of mantissa, no zero.

Both reach down to gradients 2⁻¹⁵ of the block's largest in eight steps per power of two, as Adam
divides one moment by the root of the other: an element whose gradients are a thousandth of its
neighbours' must keep both. Two more rules keep that quotient sane:

- Codes are rounded by chance. Rounded to the nearest, a second moment that changes by 0.1 % in a
  step would never leave its code.
- A second moment that is not zero never becomes zero, which would divide by (almost) nothing. What
  is below 2⁻³¹ of the largest counts as that, zero too unless the whole block is zero: elements
  that far below their neighbours move less than they should, never more.

With gradient scales spread log-normally by a factor of e within a block, updates differ from those
with float32 moments by 10 % (root mean square, β₂ 0.95) to 13 % (β₂ 0.999); where they spread by
e^2.5, by 22 to 24 %. bitsandbytes' dynamic code, a table of the same purpose (Dettmers et al. 2021,
arXiv 2110.02861), gives 9 and 13 % in the first case and divides by zero in the second. Adam's own
estimate from 1 / (1 - β₂) gradients is off by 22 % and 3 %. The simulation is a test.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch

from meshwright.run.kernels.triton_compat import tl, triton

BLOCK_ELEMENTS = 256
"""Elements that share a scale."""
MAX_CODE_VALUE = 1.875
"""What the highest code stands for: all bits of the mantissa set."""
MAX_SCALED_VALUE = MAX_CODE_VALUE * (1 - 2**-20)
"""What the largest value of a block becomes: less by more than a GPU's root is off (2⁻²²), as what
is above would run over into the sign."""
MIN_NORMAL = 2.0**-126
"""The smallest number that a GPU does not take for 0."""
EXPONENT_SHIFT = 2.0**-112
"""Makes the largest share 1.875 times the fifteenth power of two that float32 has: the code's four
bits of exponent are then the lowest of float32's, and both run out into even steps together."""
MIN_SECOND_MOMENT = 2.0**-31
"""The smallest second moment, as a share."""
SIGN_AND_CODE_MASK = 0x87F00000
"""The sign and the seven bits above the cut."""
MIN_SECOND_MOMENT_BITS = 96 << 23
"""`MIN_SECOND_MOMENT` as the bits of a float32."""
_BELOW = tl.constexpr(MAX_SCALED_VALUE)
_LEAST = tl.constexpr(MIN_NORMAL)
_SHRINK = tl.constexpr(EXPONENT_SHIFT)
_GROW = tl.constexpr(1 / EXPONENT_SHIFT)
_UNIT = tl.constexpr(1 / MAX_CODE_VALUE)
_FLOOR = tl.constexpr(MIN_SECOND_MOMENT)
_SIGN_AND_CODE = tl.constexpr(SIGN_AND_CODE_MASK)
_FLOOR_BITS = tl.constexpr(MIN_SECOND_MOMENT_BITS)


@triton.jit
def dequantize_codes(code, scale):
    """Return what codes stand for: int8 ones are signed, uint8 ones are not."""
    unit = scale * _UNIT
    if code.dtype == tl.int8:
        bits = (code.to(tl.int32) << 20).to(tl.uint32, bitcast=True) & _SIGN_AND_CODE
        value = bits.to(tl.float32, bitcast=True) * _GROW * unit
    else:
        bits = (code.to(tl.uint32) << 20) + _FLOOR_BITS
        value = bits.to(tl.float32, bitcast=True) * unit
    return value


@triton.jit
def quantize_codes(value, scale, chance, SIGNED: tl.constexpr):
    """Return the code of each value in the low byte of a uint32, rounded by 24 bits of chance."""
    # A block of zeros has scale 0.
    root = tl.rsqrt(tl.maximum(scale, _LEAST))
    share = value * (root * root * _BELOW)
    if SIGNED:
        share = share * _SHRINK
    else:
        share = tl.maximum(share, _FLOOR)
    exact = share.to(tl.uint32, bitcast=True)
    # The code's bits go to the top, those of the exponent that are always the same fall off, and
    # what chance adds below the cut carries over into the code or does not.
    code = (exact << 4) + chance
    if SIGNED:
        code = code | (exact & 0x80000000)
    return code >> 24


def block_scales_reference(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each block of the flattened values."""
    flat = values.reshape(-1).abs()
    blocks = -(-flat.numel() // BLOCK_ELEMENTS)
    padded = torch.nn.functional.pad(flat, (0, blocks * BLOCK_ELEMENTS - flat.numel()))
    return padded.view(blocks, BLOCK_ELEMENTS).amax(1) if blocks else flat


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Apply `dequantize_codes` to a whole tensor; int8 codes are signed, uint8 codes are not."""
    return _decoded(codes, _spread(scales, codes))


def _decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what codes stand for, each with a scale of its own."""
    unit = scales * (1 / MAX_CODE_VALUE)
    shifted = codes.to(torch.int32) << 20
    if codes.dtype == torch.int8:
        bits = shifted & (SIGN_AND_CODE_MASK - (1 << 32))
        return bits.view(torch.float32) * (1 / EXPONENT_SHIFT) * unit
    return (shifted + MIN_SECOND_MOMENT_BITS).view(torch.float32) * unit


def quantize_blocks(
    values: torch.Tensor, scales: torch.Tensor, chance: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    """Do what `quantize_codes` does for a whole tensor; `kind` is int8 or uint8."""
    root = scales.clamp(min=MIN_NORMAL).rsqrt()
    share = values * _spread(root * root * MAX_SCALED_VALUE, values)
    share = share * EXPONENT_SHIFT if kind == torch.int8 else share.clamp(min=MIN_SECOND_MOMENT)
    # int64 keeps the sign's bit pattern; only the low 32 bits are looked at.
    exact = share.contiguous().view(torch.int32).to(torch.int64)
    code = (exact << 4) + chance
    if kind == torch.int8:
        code = (code & 0x7FFFFFFF) | (exact & 0x80000000)
    return (code >> 24).to(torch.uint8).view(kind)


def requantize_blocks(
    codes: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a row of elements that lay in other blocks when they were coded.

    `blocks` has for each element the number of its scale. Elements that come from one block keep
    their codes and its scale. Where several meet, the largest of their values is the scale, and
    each is rounded to the nearest code: by at most 1/16 of itself, or, below 2⁻¹⁴ of the largest,
    2⁻¹⁸ of that (second moments: 2⁻³¹, below which they were never told apart).
    """
    number = codes.numel()
    if not number:
        return codes, scales.new_empty(0)
    rows = -(-number // BLOCK_ELEMENTS)
    short = rows * BLOCK_ELEMENTS - number
    sources = torch.cat([blocks, blocks[-1:].expand(short)]).view(rows, BLOCK_ELEMENTS)
    same = (sources == sources[:, :1]).all(1)
    values = _decoded(codes, scales[blocks])
    fresh = torch.where(same, scales[sources[:, 0]], block_scales_reference(values))
    half = torch.full_like(codes, 1 << 23, dtype=torch.int64)
    coded = quantize_blocks(values, fresh, half, codes.dtype)
    keeps = same.repeat_interleave(BLOCK_ELEMENTS)[:number]
    return torch.where(keeps, codes, coded), fresh


def _spread(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Give each element the number of its block."""
    spread = scales.repeat_interleave(BLOCK_ELEMENTS)
    return spread[: values.numel()].view(values.shape)
