"""Matrices in fp8 with their scales, laid out as Hopper's products want both operands.

Those products read both operands along what they sum over. A matrix used in two products that sum
over different axes (an activation: over its width in the forward pass, over the tokens for the
weight's gradient) is therefore needed twice, as it is and transposed; one read writes both.

    tensorwise   one scale for all. Two passes: the largest magnitude, then the cast; a producer
                 that knows the magnitude saves the first
    rowwise      one scale per row; the transposed copy has one per column. One pass without the
                 transposed copy, two with it
    blockwise    one scale per 1×128 elements (along what is contiguous) or per 128×128. One pass

Bytes moved, the floor: the input once per pass, one byte per element and copy.
Scales are float32 and reciprocal: data · scale is the number that was meant.
"""

from typing import Literal, NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels import quantize_fp8_triton as kernels
from meshwright.run.kernels.language import Backend, on_triton

Block = Literal["1x128", "128x128"]
Scaling = Literal["tensor", "row"] | Block

BLOCK = kernels.SIDE
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


class Fp8(NamedTuple):
    """One operand of a product: a contiguous matrix [outer, inner] that is summed over `inner`."""

    data: torch.Tensor
    scale: torch.Tensor
    """By `scaling`: tensor [1]; row [outer, 1]; 1x128 [outer, inner/128] with outer contiguous;
    128x128 [inner/128 up to a multiple of 4, outer/128] with inner contiguous."""
    scaling: Scaling


class Quantized(NamedTuple):
    """A matrix in fp8."""

    direct: Fp8
    transposed: Fp8 | None
    """The same matrix with its axes exchanged, where it was asked for."""


def quantize_tensorwise(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = E4M3,
    transpose: bool = False,
    power_of_two: bool = False,
    amax: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> Quantized:
    """Write a matrix with one scale; `amax`, a float32 of one element, spares finding it."""
    x = _matrix(x)
    if not on_triton(backend, x):
        return plain_quantize_tensorwise(
            x, dtype=dtype, transpose=transpose, power_of_two=power_of_two, amax=amax
        )
    if amax is None:
        amax = torch.zeros(1, dtype=torch.float32, device=x.device)
        kernels.find_amax(x, amax)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    data, turned = _room(x, dtype, transpose=transpose)
    kernels.cast(
        x,
        (amax, amax),
        data,
        scale,
        turned,
        None,
        by_line=False,
        largest=torch.finfo(dtype).max,
        power_of_two=power_of_two,
    )
    return _pair(data.to(dtype), scale, _to(turned, dtype), scale, "tensor")


def plain_quantize_tensorwise(
    x: torch.Tensor,
    *,
    dtype: torch.dtype,
    transpose: bool,
    power_of_two: bool = False,
    amax: torch.Tensor | None = None,
) -> Quantized:
    """Do with torch what `quantize_tensorwise` does."""
    amax = x.abs().amax().float() if amax is None else amax
    scale = _scale_for(amax.reshape(1), dtype, power_of_two)
    data = _narrow(x, scale, dtype)
    return _pair(data, scale, data.t().contiguous() if transpose else None, scale, "tensor")


def quantize_rowwise(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = E4M3,
    transpose: bool = False,
    power_of_two: bool = False,
    backend: Backend = "auto",
) -> Quantized:
    """Write a matrix with a scale per row, and transposed with a scale per column."""
    x = _matrix(x)
    if not on_triton(backend, x):
        return plain_quantize_rowwise(
            x, dtype=dtype, transpose=transpose, power_of_two=power_of_two
        )
    height, width = x.shape
    largest = torch.finfo(dtype).max
    scale = torch.empty(height, 1, dtype=torch.float32, device=x.device)
    turned_scale = torch.empty(width, 1, dtype=torch.float32, device=x.device)
    data, turned = _room(x, dtype, transpose=transpose)
    if turned is None and width <= kernels.LONGEST_ROW:
        kernels.cast_rows(x, data, scale, largest=largest, power_of_two=power_of_two)
    else:
        amax = torch.zeros(height + width, dtype=torch.float32, device=x.device)
        rows, columns = amax[:height], amax[height:]
        kernels.find_amax_of_lines(x, rows, columns)
        kernels.cast(
            x,
            (rows, columns),
            data,
            scale,
            turned,
            turned_scale,
            by_line=True,
            largest=largest,
            power_of_two=power_of_two,
        )
    return _pair(data.to(dtype), scale, _to(turned, dtype), turned_scale, "row")


def plain_quantize_rowwise(
    x: torch.Tensor, *, dtype: torch.dtype, transpose: bool, power_of_two: bool = False
) -> Quantized:
    """Do with torch what `quantize_rowwise` does."""
    copies = []
    for each in (x, x.t()) if transpose else (x,):
        scale = _scale_for(each.abs().amax(1, keepdim=True).float(), dtype, power_of_two)
        copies.append(Fp8(_narrow(each, scale, dtype), scale, "row"))
    return Quantized(copies[0], copies[1] if transpose else None)


def quantize_blockwise(
    x: torch.Tensor,
    block: Block,
    *,
    dtype: torch.dtype = E4M3,
    transpose: bool = False,
    power_of_two: bool = False,
    backend: Backend = "auto",
) -> Quantized:
    """Write a matrix with a scale per block; 1×128 blocks lie along `inner` in either copy."""
    x = _matrix(x)
    if not on_triton(backend, x):
        return plain_quantize_blockwise(
            x, block, dtype=dtype, transpose=transpose, power_of_two=power_of_two
        )
    height, width = x.shape
    scale = _block_scale(height, width, block, x.device)
    turned_scale = _block_scale(width, height, block, x.device)
    data, turned = _room(x, dtype, transpose=transpose)
    kernels.cast_blocks(
        x,
        data,
        scale,
        turned,
        turned_scale,
        square=block == "128x128",
        largest=torch.finfo(dtype).max,
        power_of_two=power_of_two,
    )
    return _pair(data.to(dtype), scale, _to(turned, dtype), turned_scale, block)


def plain_quantize_blockwise(
    x: torch.Tensor,
    block: Block,
    *,
    dtype: torch.dtype,
    transpose: bool,
    power_of_two: bool = False,
) -> Quantized:
    """Do with torch what `quantize_blockwise` does."""
    tall, copies = (BLOCK if block == "128x128" else 1), []
    for each in (x, x.t()) if transpose else (x,):
        outer, inner = each.shape
        whole = torch.nn.functional.pad(each.abs(), (0, -inner % BLOCK, 0, -outer % tall))
        tiles = whole.view(whole.shape[0] // tall, tall, whole.shape[1] // BLOCK, BLOCK)
        found = _scale_for(tiles.amax((1, 3)).float(), dtype, power_of_two)
        scale = _block_scale(outer, inner, block, each.device)
        if block == "128x128":
            scale[: found.shape[1]] = found.t()
        else:
            scale.copy_(found)
        spread = found.repeat_interleave(tall, 0)[:outer].repeat_interleave(BLOCK, 1)[:, :inner]
        copies.append(Fp8(_narrow(each, spread, dtype), scale, block))
    return Quantized(copies[0], copies[1] if transpose else None)


def dequantize(operand: Fp8) -> torch.Tensor:
    """Return the float32 matrix that an operand stands for."""
    outer, inner = operand.data.shape
    scale = operand.scale
    if operand.scaling == "128x128":
        scale = scale.t()[:, : -(-inner // BLOCK)].repeat_interleave(BLOCK, 0)[:outer]
    if operand.scaling in {"1x128", "128x128"}:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :inner]
    return operand.data.float() * scale


def _matrix(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2 or not x.numel():
        what = f"cannot write a tensor of shape {tuple(x.shape)} in fp8"
        raise InputError(
            [Problem("quantize_fp8", what, "give a matrix with elements: [rows, width]")]
        )
    return x.detach().contiguous()


def _room(
    x: torch.Tensor, dtype: torch.dtype, *, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate the copies: in float32 where the kernels are interpreted.

    The interpreter of Triton 3.9 rounds to fp8 wrongly (it loses the carry into the exponent), so
    there torch rounds, after the kernel has scaled, saturated and transposed.
    """
    dtype = dtype if x.is_cuda else torch.float32
    height, width = x.shape
    turned = torch.empty(width, height, dtype=dtype, device=x.device) if transpose else None
    return torch.empty(height, width, dtype=dtype, device=x.device), turned


def _to(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if x is None else x.to(dtype)


def _pair(
    data: torch.Tensor,
    scale: torch.Tensor,
    turned: torch.Tensor | None,
    turned_scale: torch.Tensor,
    scaling: Scaling,
) -> Quantized:
    transposed = None if turned is None else Fp8(turned, turned_scale, scaling)
    return Quantized(Fp8(data, scale, scaling), transposed)


def _block_scale(outer: int, inner: int, block: str, device: torch.device) -> torch.Tensor:
    """Allocate scales in the order the products read them in; padding is zero."""
    blocks = -(-inner // BLOCK)
    if block == "1x128":
        return torch.empty(blocks, outer, dtype=torch.float32, device=device).t()
    padded = -(-blocks // 4) * 4
    return torch.zeros(-(-outer // BLOCK), padded, dtype=torch.float32, device=device).t()


def _scale_for(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    scale = amax.clamp_min(kernels.LEAST_AMAX) * (1.0 / torch.finfo(dtype).max)
    if power_of_two:
        bits = scale.contiguous().view(torch.int32)
        scale = ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    return scale


def _narrow(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype).contiguous()
