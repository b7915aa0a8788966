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
Scales are float32 and reciprocal: data · scale is the number that was meant. A NaN makes all that
shares a scale with it NaN.
"""

from typing import TypedDict

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.fp8 import quantization_launch
from meshwright.run.kernels.fp8.fp8_matrix import (
    BLOCK,
    E4M3,
    E5M2,
    BlockScaling,
    Fp8Matrix,
    Fp8MatrixPair,
    Fp8Scaling,
    allocate_block_scales,
    dequantize,
    make_fp8_pair,
    quantize_blockwise_reference,
    quantize_rowwise_reference,
    quantize_tensorwise_reference,
    quantize_transposed_reference,
)
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton

__all__ = [
    "BLOCK",
    "E4M3",
    "E5M2",
    "BlockScaling",
    "Fp8Matrix",
    "Fp8MatrixPair",
    "Fp8Scaling",
    "dequantize",
    "quantize_blockwise",
    "quantize_blockwise_reference",
    "quantize_rowwise",
    "quantize_rowwise_reference",
    "quantize_tensorwise",
    "quantize_tensorwise_reference",
    "quantize_transposed",
    "quantize_transposed_reference",
]


class _Options(TypedDict):
    largest: float
    power_of_two: bool


def quantize_tensorwise(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = E4M3,
    transpose: bool = False,
    power_of_two: bool = False,
    amax: torch.Tensor | None = None,
    backend: KernelBackend = "auto",
) -> Fp8MatrixPair:
    """Write a matrix with one scale; `amax`, a float32 of one element, spares finding it."""
    x = _matrix(x)
    if not should_use_triton(backend, x):
        return quantize_tensorwise_reference(
            x, dtype=dtype, transpose=transpose, power_of_two=power_of_two, amax=amax
        )
    amax = _found_amax(x) if amax is None else amax
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    data, turned = _room(x, dtype, transpose=transpose)
    quantization_launch.launch_cast(
        x,
        (amax, None),
        data,
        scale,
        turned,
        None,
        per_row=False,
        largest=torch.finfo(dtype).max,
        power_of_two=power_of_two,
    )
    return make_fp8_pair(data.to(dtype), scale, _to(turned, dtype), scale, "tensor")


def quantize_rowwise(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = E4M3,
    transpose: bool = False,
    power_of_two: bool = False,
    backend: KernelBackend = "auto",
) -> Fp8MatrixPair:
    """Write a matrix with a scale per row, and transposed with a scale per column."""
    x = _matrix(x)
    if not should_use_triton(backend, x):
        return quantize_rowwise_reference(
            x, dtype=dtype, transpose=transpose, power_of_two=power_of_two
        )
    height, width = x.shape
    largest = torch.finfo(dtype).max
    scale = torch.empty(height, 1, dtype=torch.float32, device=x.device)
    turned_scale = torch.empty(width, 1, dtype=torch.float32, device=x.device)
    data, turned = _room(x, dtype, transpose=transpose)
    if turned is None and width <= quantization_launch.MAX_ROW_ELEMENTS:
        quantization_launch.launch_cast_rows(
            x, data, scale, largest=largest, power_of_two=power_of_two
        )
    else:
        amax = torch.zeros(height + width, dtype=torch.float32, device=x.device)
        rows = amax[:height]
        columns = None if turned is None else amax[height:]
        quantization_launch.launch_line_amax(x, rows, columns)
        quantization_launch.launch_cast(
            x,
            (rows, columns),
            data,
            scale,
            turned,
            turned_scale,
            per_row=True,
            largest=largest,
            power_of_two=power_of_two,
        )
    return make_fp8_pair(data.to(dtype), scale, _to(turned, dtype), turned_scale, "row")


def quantize_blockwise(
    x: torch.Tensor,
    block: BlockScaling,
    *,
    dtype: torch.dtype = E4M3,
    transpose: bool = False,
    power_of_two: bool = False,
    backend: KernelBackend = "auto",
) -> Fp8MatrixPair:
    """Write a matrix with a scale per block; 1×128 blocks lie along `inner` in either copy."""
    x = _matrix(x)
    if not should_use_triton(backend, x):
        return quantize_blockwise_reference(
            x, block, dtype=dtype, transpose=transpose, power_of_two=power_of_two
        )
    height, width = x.shape
    scale = allocate_block_scales(height, width, block, x.device)
    turned_scale = allocate_block_scales(width, height, block, x.device)
    data, turned = _room(x, dtype, transpose=transpose)
    quantization_launch.launch_cast_blocks(
        x,
        data,
        scale,
        turned,
        turned_scale,
        square=block == "128x128",
        largest=torch.finfo(dtype).max,
        power_of_two=power_of_two,
    )
    return make_fp8_pair(data.to(dtype), scale, _to(turned, dtype), turned_scale, block)


def quantize_transposed(
    x: torch.Tensor,
    scaling: Fp8Scaling,
    *,
    dtype: torch.dtype = E4M3,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    backend: KernelBackend = "auto",
) -> Fp8Matrix:
    """Write the transposed copy alone, the same numbers as beside a direct one.

    `scale`, of a `tensor` scaling, is what an earlier copy of the same matrix was written with; it
    spares the pass that finds the largest magnitude.
    """
    x = _matrix(x)
    if scale is not None and scaling != "tensor":
        what = f"{scaling} scales of a transposed copy are not those of another copy"
        raise InputError([Problem("scale", what, "leave it out")])
    if not should_use_triton(backend, x):
        return quantize_transposed_reference(x, scaling, dtype, power_of_two, scale)
    height, width = x.shape
    turned = torch.empty(width, height, dtype=_written(x, dtype), device=x.device)
    options: _Options = {"largest": torch.finfo(dtype).max, "power_of_two": power_of_two}
    if scaling == "tensor":
        amax = None if scale is not None else _found_amax(x)
        scale = torch.empty(1, dtype=torch.float32, device=x.device) if scale is None else scale
        quantization_launch.launch_cast(
            x, (amax, None), None, scale, turned, None, per_row=False, **options
        )
    elif scaling == "row":
        scale = torch.empty(width, 1, dtype=torch.float32, device=x.device)
        columns = torch.zeros(width, dtype=torch.float32, device=x.device)
        quantization_launch.launch_line_amax(x, None, columns)
        quantization_launch.launch_cast(
            x, (None, columns), None, None, turned, scale, per_row=True, **options
        )
    else:
        scale = allocate_block_scales(width, height, scaling, x.device)
        square = scaling == "128x128"
        quantization_launch.launch_cast_blocks(
            x, None, None, turned, scale, square=square, **options
        )
    return Fp8Matrix(turned.to(dtype), scale, scaling)


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
    """Allocate the copies."""
    dtype = _written(x, dtype)
    height, width = x.shape
    turned = torch.empty(width, height, dtype=dtype, device=x.device) if transpose else None
    return torch.empty(height, width, dtype=dtype, device=x.device), turned


def _written(x: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the format that kernels write: float32 where they are interpreted.

    The interpreter of Triton 3.9 rounds to fp8 wrongly (it loses the carry into the exponent), so
    there torch rounds, after the kernel has scaled, saturated and transposed.
    """
    return dtype if x.is_cuda else torch.float32


def _found_amax(x: torch.Tensor) -> torch.Tensor:
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    quantization_launch.launch_amax(x, amax)
    return amax


def _to(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if x is None else x.to(dtype)
