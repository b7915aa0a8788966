"""How the kernels that write matrices in fp8 are launched.

Whoever calls them allocates what they fill in; `kernels.fp8.quantization` does, and says what it
all means. `amax` is the largest magnitude, `scale` what fp8 numbers are multiplied with to get
back.

Every program reads one tile, all of it at once, and is done: what keeps the memory busy is how many
programs a multiprocessor holds, so each kernel is held to registers that let several of them in.
Passes that find magnitudes go from the end of the matrix to its start and those that write go the
other way, so that each begins with what the one before it has left in the L2 cache.
"""

# Kernels take their matrices by position, and so does what launches them.
# ruff: noqa: PLR0917

import math
from typing import Any, NamedTuple

import torch

from meshwright.run.kernels.fp8 import quantization_kernel
from meshwright.run.kernels.fp8.quantization_kernel import BLOCK_SIDE
from meshwright.run.kernels.triton_compat import triton

AMAX_BLOCK = 16384
AMAX_WARPS = 4
MAX_ROW_ELEMENTS = 65536
"""Elements of a row that one program can hold in registers."""


class Fp8LaunchConfig(NamedTuple):
    """How a program that works on a tile is run."""

    warps: int
    max_registers: int | None
    """Most that a thread may take where the matrix is 16 bits wide; copies both ways then spill
    none, as compiled by Triton 3.6 for Hopper."""


LINE_AMAX_LAUNCH = Fp8LaunchConfig(8, None)
PACKED_LINE_AMAX_LAUNCH = Fp8LaunchConfig(4, None)
PACKED_TILE_HEIGHT, PACKED_TILE_WIDTH = 64, 64
"""Tile of words of two numbers each; divides a tile of SIDE."""
CAST_LAUNCH = Fp8LaunchConfig(8, 64)
CAST_PER_LINE_LAUNCH = Fp8LaunchConfig(8, 80)
CAST_SQUARE_BLOCKS_LAUNCH = Fp8LaunchConfig(8, 64)
CAST_LINE_BLOCKS_LAUNCH = Fp8LaunchConfig(8, 80)
GLUON_CAST_PER_LINE_LAUNCH = Fp8LaunchConfig(16, 40)
GLUON_CAST_LINE_BLOCKS_LAUNCH = Fp8LaunchConfig(8, 64)


def launch_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise `amax`, one float32, to the largest magnitude in `x`."""
    count = x.numel()
    quantization_kernel.amax_kernel[(triton.cdiv(count, AMAX_BLOCK),)](
        x,
        amax.view(torch.int32),
        count,
        EVEN=count % AMAX_BLOCK == 0,
        BLOCK=AMAX_BLOCK,
        num_warps=AMAX_WARPS,
    )


def launch_line_amax(
    x: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None
) -> None:
    """Raise `rows` and `columns`, where given, to the largest magnitudes of those of `x`."""
    if _is_whole(x):
        height, width = x.shape[0], x.shape[1] // 2
        quantization_kernel.packed_line_amax_kernel[
            (height // PACKED_TILE_HEIGHT * (width // PACKED_TILE_WIDTH),)
        ](
            x.view(torch.int32),
            None if rows is None else rows.view(torch.int32),
            None if columns is None else columns.view(torch.int32),
            width,
            HEIGHT=PACKED_TILE_HEIGHT,
            WIDTH=PACKED_TILE_WIDTH,
            num_warps=PACKED_LINE_AMAX_LAUNCH.warps,
        )
        return
    quantization_kernel.line_amax_kernel[_tiles(x)](
        x,
        None if rows is None else rows.view(torch.int32),
        None if columns is None else columns.view(torch.int32),
        *x.shape,
        **_options(x, LINE_AMAX_LAUNCH),
    )


def launch_cast(
    x: torch.Tensor,
    amax: tuple[torch.Tensor | None, torch.Tensor | None],
    data: torch.Tensor | None,
    scale: torch.Tensor | None,
    transposed: torch.Tensor | None,
    turned_scale: torch.Tensor | None,
    *,
    per_row: bool,
    largest: float,
    power_of_two: bool,
) -> None:
    """Write `x` (`data`), its transpose (`transposed`), or both.

    `amax` is that of rows and of columns; of all in the first place where not `per_row`. One scale
    for all is then written to `scale`; it is taken from there where there is no `amax`.
    """
    if per_row and _is_whole(x, data, transposed):
        from meshwright.run.kernels.fp8.quantization_gluon_kernel import cast_tile_gluon_kernel

        cast_tile_gluon_kernel[_tiles(x)](
            x,
            *amax,
            data,
            scale,
            transposed,
            turned_scale,
            *x.shape,
            LARGEST=largest,
            POWER_OF_TWO=power_of_two,
            num_warps=GLUON_CAST_PER_LINE_LAUNCH.warps,
            maxnreg=GLUON_CAST_PER_LINE_LAUNCH.max_registers,
        )
        return
    quantization_kernel.cast_tile_kernel[_tiles(x)](
        x,
        *amax,
        data,
        scale,
        transposed,
        turned_scale,
        *x.shape,
        BY_LINE=per_row,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        **_options(x, CAST_PER_LINE_LAUNCH if per_row else CAST_LAUNCH),
    )


def launch_cast_rows(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, *, largest: float, power_of_two: bool
) -> None:
    """Write `x` with a scale for each row, reading it once."""
    height, width = x.shape
    block = max(128, 1 << math.ceil(math.log2(width)))
    quantization_kernel.cast_row_kernel[(height,)](
        x,
        data,
        scale,
        width,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        BLOCK=block,
        num_warps=max(1, min(32, block // 512)),
    )


def launch_cast_blocks(
    x: torch.Tensor,
    data: torch.Tensor | None,
    scale: torch.Tensor | None,
    transposed: torch.Tensor | None,
    turned_scale: torch.Tensor | None,
    *,
    square: bool,
    largest: float,
    power_of_two: bool,
) -> None:
    """Write `x` with a scale for each 1×128 (along what is contiguous) or 128×128 elements."""
    if not square and _is_whole(x, data, transposed):
        from meshwright.run.kernels.fp8.quantization_gluon_kernel import (
            cast_tile_lines_gluon_kernel,
        )

        assert scale is not None
        assert turned_scale is not None
        cast_tile_lines_gluon_kernel[_tiles(x)](
            x,
            data,
            scale,
            transposed,
            turned_scale,
            *x.shape,
            scale.stride(1),
            turned_scale.stride(1),
            LARGEST=largest,
            POWER_OF_TWO=power_of_two,
            num_warps=GLUON_CAST_LINE_BLOCKS_LAUNCH.warps,
            maxnreg=GLUON_CAST_LINE_BLOCKS_LAUNCH.max_registers,
        )
        return
    quantization_kernel.cast_block_kernel[_tiles(x)](
        x,
        data,
        scale,
        transposed,
        turned_scale,
        *x.shape,
        # A row of scales holds those of one block (1×128), or of one block row (128×128).
        0 if scale is None else scale.stride(1),
        0 if turned_scale is None else turned_scale.stride(1),
        SQUARE=square,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        **_options(x, CAST_SQUARE_BLOCKS_LAUNCH if square else CAST_LINE_BLOCKS_LAUNCH),
    )


def _is_whole(x: torch.Tensor, *copies: torch.Tensor | None) -> bool:
    """Say whether kernels that cannot be interpreted, and know whole tiles alone, do this work."""
    even = not (x.shape[0] % BLOCK_SIDE or x.shape[1] % BLOCK_SIDE)
    return even and x.is_cuda and x.dtype == torch.bfloat16 and all(c is not None for c in copies)


def _tiles(x: torch.Tensor) -> tuple[int]:
    height, width = x.shape
    return (triton.cdiv(height, BLOCK_SIDE) * triton.cdiv(width, BLOCK_SIDE),)


def _options(x: torch.Tensor, launch: Fp8LaunchConfig) -> dict[str, Any]:
    """Say how tiles are worked on; where every tile is whole, no access needs a mask."""
    return {
        "EVEN": not (x.shape[0] % BLOCK_SIDE or x.shape[1] % BLOCK_SIDE),
        "num_warps": launch.warps,
        "maxnreg": launch.max_registers if x.element_size() == 2 else None,
    }
