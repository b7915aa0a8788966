"""Matrices in fp8 as values, and how torch alone writes them: see `kernels.fp8.quantization`."""

from typing import Literal, NamedTuple

import torch

from meshwright.run.kernels.fp8.quantization_kernel import BLOCK_SIDE, MIN_AMAX

BlockScaling = Literal["1x128", "128x128"]
Fp8Scaling = Literal["tensor", "row"] | BlockScaling

BLOCK = BLOCK_SIDE
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


class Fp8Matrix(NamedTuple):
    """One operand of a product: a contiguous matrix [outer, inner] that is summed over `inner`."""

    data: torch.Tensor
    scale: torch.Tensor
    """By `scaling`: tensor [1]; row [outer, 1]; 1x128 [outer, inner/128] with outer contiguous;
    128x128 [inner/128 up to a multiple of 4, outer/128] with inner contiguous."""
    scaling: Fp8Scaling


class Fp8MatrixPair(NamedTuple):
    """A matrix in fp8."""

    direct: Fp8Matrix
    transposed: Fp8Matrix | None
    """The same matrix with its axes exchanged, where it was asked for."""


def quantize_tensorwise_reference(
    x: torch.Tensor,
    *,
    dtype: torch.dtype,
    transpose: bool,
    power_of_two: bool = False,
    amax: torch.Tensor | None = None,
) -> Fp8MatrixPair:
    """Do with torch what `quantize_tensorwise` does."""
    amax = x.abs().amax().float() if amax is None else amax
    scale = _scale_for(amax.reshape(1), dtype, power_of_two)
    data = _narrow(x, scale, dtype)
    return make_fp8_pair(data, scale, data.t().contiguous() if transpose else None, scale, "tensor")


def quantize_rowwise_reference(
    x: torch.Tensor, *, dtype: torch.dtype, transpose: bool, power_of_two: bool = False
) -> Fp8MatrixPair:
    """Do with torch what `quantize_rowwise` does."""
    copies = []
    for each in (x, x.t()) if transpose else (x,):
        scale = _scale_for(each.abs().amax(1, keepdim=True).float(), dtype, power_of_two)
        copies.append(Fp8Matrix(_narrow(each, scale, dtype), scale, "row"))
    return Fp8MatrixPair(copies[0], copies[1] if transpose else None)


def quantize_blockwise_reference(
    x: torch.Tensor,
    block: BlockScaling,
    *,
    dtype: torch.dtype,
    transpose: bool,
    power_of_two: bool = False,
) -> Fp8MatrixPair:
    """Do with torch what `quantize_blockwise` does."""
    tall, copies = (BLOCK if block == "128x128" else 1), []
    for each in (x, x.t()) if transpose else (x,):
        outer, inner = each.shape
        whole = torch.nn.functional.pad(each.abs(), (0, -inner % BLOCK, 0, -outer % tall))
        tiles = whole.view(whole.shape[0] // tall, tall, whole.shape[1] // BLOCK, BLOCK)
        found = _scale_for(tiles.amax((1, 3)).float(), dtype, power_of_two)
        scale = allocate_block_scales(outer, inner, block, each.device)
        if block == "128x128":
            scale[: found.shape[1]] = found.t()
        else:
            scale.copy_(found)
        spread = found.repeat_interleave(tall, 0)[:outer].repeat_interleave(BLOCK, 1)[:, :inner]
        copies.append(Fp8Matrix(_narrow(each, spread, dtype), scale, block))
    return Fp8MatrixPair(copies[0], copies[1] if transpose else None)


def quantize_transposed_reference(
    x: torch.Tensor,
    scaling: Fp8Scaling,
    dtype: torch.dtype,
    power_of_two: bool,
    scale: torch.Tensor | None,
) -> Fp8Matrix:
    """Do with torch what `quantize_transposed` does."""
    if scale is not None:
        return Fp8Matrix(_narrow(x.t(), scale, dtype), scale, scaling)
    turned = x.t().contiguous()
    if scaling == "tensor":
        made = quantize_tensorwise_reference(
            turned, dtype=dtype, transpose=False, power_of_two=power_of_two
        )
    elif scaling == "row":
        made = quantize_rowwise_reference(
            turned, dtype=dtype, transpose=False, power_of_two=power_of_two
        )
    else:
        made = quantize_blockwise_reference(
            turned, scaling, dtype=dtype, transpose=False, power_of_two=power_of_two
        )
    return made.direct


def dequantize(operand: Fp8Matrix) -> torch.Tensor:
    """Return the float32 matrix that an operand stands for."""
    outer, inner = operand.data.shape
    scale = operand.scale
    if operand.scaling == "128x128":
        scale = scale.t()[:, : -(-inner // BLOCK)].repeat_interleave(BLOCK, 0)[:outer]
    if operand.scaling in {"1x128", "128x128"}:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :inner]
    return operand.data.float() * scale


def make_fp8_pair(
    data: torch.Tensor,
    scale: torch.Tensor,
    turned: torch.Tensor | None,
    turned_scale: torch.Tensor,
    scaling: Fp8Scaling,
) -> Fp8MatrixPair:
    """Put both copies together, the transposed one where it is there."""
    transposed = None if turned is None else Fp8Matrix(turned, turned_scale, scaling)
    return Fp8MatrixPair(Fp8Matrix(data, scale, scaling), transposed)


def allocate_block_scales(outer: int, inner: int, block: str, device: torch.device) -> torch.Tensor:
    """Allocate scales in the order the products read them in; padding is zero."""
    blocks = -(-inner // BLOCK)
    if block == "1x128":
        return torch.empty(blocks, outer, dtype=torch.float32, device=device).t()
    padded = -(-blocks // 4) * 4
    make = torch.empty if padded == blocks else torch.zeros
    return make(-(-outer // BLOCK), padded, dtype=torch.float32, device=device).t()


def _scale_for(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    scale = amax.clamp_min(MIN_AMAX) * (1.0 / torch.finfo(dtype).max)
    if power_of_two:
        bits = scale.contiguous().view(torch.int32)
        even = ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, even)
    return scale


def _narrow(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype).contiguous()
