"""Eight bits for each optimizer moment: a code per element, a float32 scale per 256 elements.

The scale is the largest magnitude of the block, and a code c stands for scale × (c / levels)⁸: 127
levels and a sign for the first moment, 255 for the second, which is never negative. The eighth root
spends codes on small values as well as on large ones, as Adam divides one moment by the root of the
other: an element whose gradients are a thousandth of its neighbours' must keep both. Two more rules
keep that quotient sane:

- Codes are rounded by chance. Rounded to the nearest, a second moment that changes by 0.1 % in a
  step would never leave its code.
- A second moment that is not zero never becomes code 0, which would divide by (almost) nothing.

With gradient scales spread log-normally by a factor of e within a block, updates differ from those
with float32 moments by 10 % (root mean square, β₂ 0.95) to 13 % (β₂ 0.999); where they spread by
e^2.5, by 21 to 25 %. bitsandbytes' dynamic code, a table of the same purpose (Dettmers et al. 2021,
arXiv 2110.02861), gives 9 and 13 % in the first case and divides by zero in the second. Adam's own
estimate from 1 / (1 - β₂) gradients is off by 22 % and 3 %. The simulation is a test.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch

from meshwright.run.kernels.language import tl, triton

BLOCK_ELEMENTS = 256
"""Elements that share a scale."""
SIGNED_LEVELS = 127
UNSIGNED_LEVELS = 255


@triton.jit
def decode(code, scale, LEVELS: tl.constexpr):
    """Return what codes stand for."""
    value = code.to(tl.float32) * (1.0 / LEVELS)
    root = value * value
    root = root * root
    magnitude = root * root * scale
    return tl.where(value < 0, -magnitude, magnitude)


@triton.jit
def encode(value, scale, bits, LEVELS: tl.constexpr):
    """Return the code of each value as float32, rounded by the low 16 bits of chance."""
    # A block of zeros has scale 0; this is the smallest number a GPU does not take for 0.
    share = tl.abs(value) * (1.0 / tl.maximum(scale, 1.2e-38))
    root = tl.sqrt(tl.sqrt(tl.sqrt(share)))
    chance = (bits & 0xFFFF).to(tl.float32) * (1.0 / 65536)
    code = tl.minimum(tl.floor(root * LEVELS + chance), LEVELS)
    if LEVELS == 127:
        code = tl.where(value < 0, -code, code)
    else:
        code = tl.where(value > 0, tl.maximum(code, 1.0), code)
    return code


def plain_scales(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each block of the flattened values."""
    flat = values.reshape(-1).abs()
    blocks = -(-flat.numel() // BLOCK_ELEMENTS)
    padded = torch.nn.functional.pad(flat, (0, blocks * BLOCK_ELEMENTS - flat.numel()))
    return padded.view(blocks, BLOCK_ELEMENTS).amax(1) if blocks else flat


def plain_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Do what `decode` does for a whole tensor: int8 codes are signed, uint8 ones are not."""
    value = codes.float() * (1.0 / _levels(codes.dtype))
    root = value * value
    root = root * root
    magnitude = root * root * _spread(scales, codes)
    return torch.where(value < 0, -magnitude, magnitude)


def plain_encode(
    values: torch.Tensor, scales: torch.Tensor, bits: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    """Do what `encode` does for a whole tensor; `kind` is int8 or uint8."""
    levels = _levels(kind)
    inverse = 1.0 / scales.clamp(min=1.2e-38)
    root = (values.abs() * _spread(inverse, values)).sqrt().sqrt().sqrt()
    chance = (bits & 0xFFFF).float() * (1.0 / 65536)
    code = (root * levels + chance).floor().clamp(max=levels)
    if kind == torch.int8:
        return torch.where(values < 0, -code, code).to(kind)
    return torch.where(values > 0, code.clamp(min=1), code).to(kind)


def _levels(kind: torch.dtype) -> int:
    return SIGNED_LEVELS if kind == torch.int8 else UNSIGNED_LEVELS


def _spread(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Give each element the number of its block."""
    spread = scales.repeat_interleave(BLOCK_ELEMENTS)
    return spread[: values.numel()].view(values.shape)
