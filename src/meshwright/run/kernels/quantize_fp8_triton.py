"""How the kernels that write matrices in fp8 are launched.

Whoever calls them allocates what they fill in; `quantize_fp8` does, and says what it all means.
`amax` is the largest magnitude, `scale` what fp8 numbers are multiplied with to get back.

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

from meshwright.run.kernels import quantize_fp8_kernel as kernels
from meshwright.run.kernels.language import triton
from meshwright.run.kernels.quantize_fp8_kernel import SIDE

AMAX_BLOCK = 16384
AMAX_WARPS = 4
LONGEST_ROW = 65536
"""Elements of a row that one program can hold in registers."""


class Launch(NamedTuple):
    """How a program that works on a tile is run."""

    warps: int
    registers: int | None
    """Most that a thread may take where the matrix is 16 bits wide; copies both ways then spill
    none, as compiled by Triton 3.6 for Hopper."""


AMAX_OF_LINES = Launch(8, None)
AMAX_OF_PAIRS = Launch(4, None)
PAIRS_HEIGHT, PAIRS_WIDTH = 64, 64
"""Tile of words of two numbers each; divides a tile of SIDE."""
CAST = Launch(8, 64)
CAST_BY_LINE = Launch(8, 80)
CAST_SQUARES = Launch(8, 64)
CAST_LINES_OF_BLOCKS = Launch(8, 80)
CAST_WHOLE_BY_LINE = Launch(16, 40)
CAST_WHOLE_LINES_OF_BLOCKS = Launch(8, 64)


def find_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise `amax`, one float32, to the largest magnitude in `x`."""
    count = x.numel()
    kernels.amax_of_all[(triton.cdiv(count, AMAX_BLOCK),)](
        x,
        amax.view(torch.int32),
        count,
        EVEN=count % AMAX_BLOCK == 0,
        BLOCK=AMAX_BLOCK,
        num_warps=AMAX_WARPS,
    )


def find_amax_of_lines(
    x: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None
) -> None:
    """Raise `rows` and `columns`, where given, to the largest magnitudes of those of `x`."""
    if _is_whole(x):
        height, width = x.shape[0], x.shape[1] // 2
        kernels.amax_of_lines_of_pairs[(height // PAIRS_HEIGHT * (width // PAIRS_WIDTH),)](
            x.view(torch.int32),
            None if rows is None else rows.view(torch.int32),
            None if columns is None else columns.view(torch.int32),
            width,
            HEIGHT=PAIRS_HEIGHT,
            WIDTH=PAIRS_WIDTH,
            num_warps=AMAX_OF_PAIRS.warps,
        )
        return
    kernels.amax_of_lines[_tiles(x)](
        x,
        None if rows is None else rows.view(torch.int32),
        None if columns is None else columns.view(torch.int32),
        *x.shape,
        **_options(x, AMAX_OF_LINES),
    )


def cast(
    x: torch.Tensor,
    amax: tuple[torch.Tensor | None, torch.Tensor | None],
    data: torch.Tensor | None,
    scale: torch.Tensor | None,
    turned: torch.Tensor | None,
    turned_scale: torch.Tensor | None,
    *,
    by_line: bool,
    largest: float,
    power_of_two: bool,
) -> None:
    """Write `x` (`data`), its transpose (`turned`), or both.

    `amax` is that of rows and of columns; of all in the first place where not `by_line`. One scale
    for all is then written to `scale`; it is taken from there where there is no `amax`.
    """
    if by_line and _is_whole(x, data, turned):
        from meshwright.run.kernels.quantize_fp8_whole import cast_tile

        cast_tile[_tiles(x)](
            x,
            *amax,
            data,
            scale,
            turned,
            turned_scale,
            *x.shape,
            LARGEST=largest,
            POWER_OF_TWO=power_of_two,
            num_warps=CAST_WHOLE_BY_LINE.warps,
            maxnreg=CAST_WHOLE_BY_LINE.registers,
        )
        return
    kernels.cast_tile[_tiles(x)](
        x,
        *amax,
        data,
        scale,
        turned,
        turned_scale,
        *x.shape,
        BY_LINE=by_line,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        **_options(x, CAST_BY_LINE if by_line else CAST),
    )


def cast_rows(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, *, largest: float, power_of_two: bool
) -> None:
    """Write `x` with a scale for each row, reading it once."""
    height, width = x.shape
    block = max(128, 1 << math.ceil(math.log2(width)))
    kernels.cast_row[(height,)](
        x,
        data,
        scale,
        width,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        BLOCK=block,
        num_warps=max(1, min(32, block // 512)),
    )


def cast_blocks(
    x: torch.Tensor,
    data: torch.Tensor | None,
    scale: torch.Tensor | None,
    turned: torch.Tensor | None,
    turned_scale: torch.Tensor | None,
    *,
    square: bool,
    largest: float,
    power_of_two: bool,
) -> None:
    """Write `x` with a scale for each 1×128 (along what is contiguous) or 128×128 elements."""
    if not square and _is_whole(x, data, turned):
        from meshwright.run.kernels.quantize_fp8_whole import cast_lines_of_tile

        assert scale is not None
        assert turned_scale is not None
        cast_lines_of_tile[_tiles(x)](
            x,
            data,
            scale,
            turned,
            turned_scale,
            *x.shape,
            scale.stride(1),
            turned_scale.stride(1),
            LARGEST=largest,
            POWER_OF_TWO=power_of_two,
            num_warps=CAST_WHOLE_LINES_OF_BLOCKS.warps,
            maxnreg=CAST_WHOLE_LINES_OF_BLOCKS.registers,
        )
        return
    kernels.cast_tile_of_blocks[_tiles(x)](
        x,
        data,
        scale,
        turned,
        turned_scale,
        *x.shape,
        # A row of scales holds those of one block (1×128), or of one block row (128×128).
        0 if scale is None else scale.stride(1),
        0 if turned_scale is None else turned_scale.stride(1),
        SQUARE=square,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        **_options(x, CAST_SQUARES if square else CAST_LINES_OF_BLOCKS),
    )


def _is_whole(x: torch.Tensor, *copies: torch.Tensor | None) -> bool:
    """Say whether kernels that cannot be interpreted, and know whole tiles alone, do this work."""
    even = not (x.shape[0] % SIDE or x.shape[1] % SIDE)
    return even and x.is_cuda and x.dtype == torch.bfloat16 and all(c is not None for c in copies)


def _tiles(x: torch.Tensor) -> tuple[int]:
    height, width = x.shape
    return (triton.cdiv(height, SIDE) * triton.cdiv(width, SIDE),)


def _options(x: torch.Tensor, launch: Launch) -> dict[str, Any]:
    """Say how tiles are worked on; where every tile is whole, no access needs a mask."""
    return {
        "EVEN": not (x.shape[0] % SIDE or x.shape[1] % SIDE),
        "num_warps": launch.warps,
        "maxnreg": launch.registers if x.element_size() == 2 else None,
    }
