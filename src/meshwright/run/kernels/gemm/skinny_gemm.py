"""Products of few rows with a large weight, as decoding has them, and gate and up in one kernel.

    skinny_linear    y_NM = x_NK · wᵀ_KM
    skinny_glu       y_NF = activation(x · wᵀ of the gate's rows) · (x · wᵀ of up's)

With few rows a product takes as long as its weight takes to be read. Kernels are launched while the
one before still runs. With `prefetches_weight` they also begin to read the weight then, for nothing
that runs just then changes it. They stream the weight once, and add up in float32. The gated
product rounds once, at the end, where two kernels round the product too. Asking for the weight's
beginning by a prefetch into the second-level cache gained nothing.

Floor: the bytes of the weight. A gated product of N rows saves writing and reading 2·N·F numbers,
and a launch.

Whether this is faster than the library depends on rows, shape and device: whoever serves a model
measures both.

Letters: N rows, K inner width, M outputs, F the gated result's width (the weight has 2F rows, the
gate's first).
"""

from typing import Any, NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.activation.glu import DEFAULT_CLAMP_LIMIT, glu_reference
from meshwright.run.kernels.gemm.skinny_gemm_kernel import skinny_gemm_kernel
from meshwright.run.kernels.triton_compat import (
    KernelBackend,
    make_pdl_launch_options,
    should_use_triton,
)
from meshwright.spec.model.feedforward import Activation

MAX_ROWS = 128
"""Beyond, products are bound by their operations, which the library does best."""


class SkinnyGemmTiles(NamedTuple):
    """How a product is cut: a program's output tile, its step along the sum, its resources."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    transposed: bool = False
    """Multiply the weight by the rows: tensor cores want 64 or more of their first operand."""
    prefetches_weight: bool = False
    """Fill all stages with the weight before it may begin (Hopper)."""


SkinnyGemmTable = dict[int, tuple[SkinnyGemmTiles, ...]]
"""Tiles by the most rows they are for; the first that makes enough programs is taken."""

LINEAR_TILES: SkinnyGemmTable = {
    16: (SkinnyGemmTiles(16, 64, 256, warps=4, stages=5, transposed=True),),
    32: (SkinnyGemmTiles(32, 64, 256, warps=4, stages=4, transposed=True, prefetches_weight=True),),
    64: (
        SkinnyGemmTiles(64, 64, 128, warps=4, stages=6, transposed=True, prefetches_weight=True),
        SkinnyGemmTiles(64, 16, 256, warps=4, stages=5, prefetches_weight=True),
    ),
    128: (SkinnyGemmTiles(64, 64, 128, warps=4, stages=6, prefetches_weight=True),),
}
GLU_TILES: SkinnyGemmTable = {
    16: (
        SkinnyGemmTiles(16, 64, 128, warps=4, stages=2, transposed=True),
        SkinnyGemmTiles(16, 64, 128, warps=4, stages=6, transposed=True),
    ),
    32: (SkinnyGemmTiles(32, 64, 128, warps=4, stages=5, transposed=True),),
    64: (
        SkinnyGemmTiles(64, 64, 128, warps=4, stages=2),
        SkinnyGemmTiles(64, 32, 128, warps=4, stages=6),
    ),
    128: (
        SkinnyGemmTiles(128, 64, 64, warps=4, stages=3),
        SkinnyGemmTiles(64, 64, 128, warps=4, stages=4),
    ),
}
"""Chosen on an H200 among 415 cuts, for the layers of 0.6B, 8B and 14B models (2026-11-16)."""
MIN_PROGRAMS = 64
"""Programs that keep the memory busy: later entries are for results that have fewer."""


def find_row_bucket(rows: int) -> int | None:
    """Return the number of rows whose tiles so many rows use; None where there are too many."""
    return next((most for most in LINEAR_TILES if rows <= most), None)


def is_skinny_gemm_supported(x_NK: torch.Tensor, weight_MK: torch.Tensor) -> bool:
    """Say whether these operands are ones that the kernel reads: few rows, 16 bits, aligned."""
    return (
        0 < len(x_NK) <= MAX_ROWS
        and x_NK.dtype == weight_MK.dtype
        and x_NK.dtype in {torch.bfloat16, torch.float16}
        and x_NK.is_contiguous()
        and weight_MK.is_contiguous()
        and x_NK.shape[1] % 256 == 0
        and x_NK.data_ptr() % 16 == weight_MK.data_ptr() % 16 == 0
    )


def skinny_linear(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    *,
    tiles: SkinnyGemmTiles | None = None,
    backend: KernelBackend = "auto",
) -> torch.Tensor:
    """Return x · weightᵀ of at most 128 rows in 16 bits."""
    _check(x_NK, weight_MK)
    if not should_use_triton(backend, x_NK):
        return x_NK @ weight_MK.t()
    return _streamed(
        x_NK,
        weight_MK,
        tiles or select_skinny_tiles(LINEAR_TILES, len(x_NK), len(weight_MK)),
        None,
        DEFAULT_CLAMP_LIMIT,
    )


def skinny_glu(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    activation: Activation,
    *,
    limit: float | None = None,
    tiles: SkinnyGemmTiles | None = None,
    backend: KernelBackend = "auto",
) -> torch.Tensor:
    """Return the gated product of at most 128 rows with a weight that has the gate's rows first."""
    _check(x_NK, weight_MK)
    if len(weight_MK) % 2:
        what = f"{len(weight_MK)} rows are no two equal halves"
        raise InputError([Problem("weight", what, "give the gate's rows, then as many for up")])
    if not should_use_triton(backend, x_NK):
        return glu_reference(x_NK @ weight_MK.t(), activation, limit=limit)
    bound = DEFAULT_CLAMP_LIMIT if limit is None else limit
    tiles = tiles or select_skinny_tiles(GLU_TILES, len(x_NK), len(weight_MK) // 2)
    return _streamed(x_NK, weight_MK, tiles, activation, bound)


def select_skinny_tiles(table: SkinnyGemmTable, rows: int, columns: int) -> SkinnyGemmTiles:
    """Return the widest tiles that make enough programs of a result, else the narrowest."""
    bucket = find_row_bucket(rows)
    assert bucket is not None, "checked before"
    ways = table[bucket]
    programs = (-(-rows // tiles.rows) * -(-columns // tiles.columns) for tiles in ways)
    return next(
        (way for way, many in zip(ways, programs, strict=True) if many >= MIN_PROGRAMS), ways[-1]
    )


def _check(x_NK: torch.Tensor, weight_MK: torch.Tensor) -> None:
    if x_NK.dim() != 2 or weight_MK.dim() != 2 or x_NK.shape[1] != weight_MK.shape[1]:
        what = f"shapes {tuple(x_NK.shape)} and {tuple(weight_MK.shape)} have no inner width"
        raise InputError([Problem("x", what, "give matrices with equally long rows")])
    if not is_skinny_gemm_supported(x_NK, weight_MK):
        what = f"{x_NK.dtype} rows of {x_NK.shape[1]}, {len(x_NK)} of them"
        fix = f"give 1 to {MAX_ROWS} contiguous rows of 16 bits, of a multiple of 256 elements"
        raise InputError([Problem("x", what, fix)])


def _streamed(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    tiles: SkinnyGemmTiles,
    activation: Activation | None,
    limit: float,
) -> torch.Tensor:
    rows, inner = x_NK.shape
    columns = len(weight_MK) // (1 if activation is None else 2)
    out = torch.empty(rows, columns, dtype=x_NK.dtype, device=x_NK.device)
    options = make_pdl_launch_options(x_NK)
    programs = -(-rows // tiles.rows) * -(-columns // tiles.columns)
    if tiles.prefetches_weight:
        from meshwright.run.kernels.gemm.skinny_gemm_prefetch_kernel import (
            make_tma_descriptor,
            skinny_gemm_prefetch_kernel,
        )

        skinny_gemm_prefetch_kernel[(programs,)](
            make_tma_descriptor(x_NK, tiles.rows, tiles.depth),
            make_tma_descriptor(weight_MK, tiles.columns, tiles.depth),
            out, limit, rows, columns, inner,
            ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, STAGES=tiles.stages,
            WARPS=tiles.warps, TURNED=tiles.transposed, ACTIVATION=activation,
            num_warps=tiles.warps, **options,
        )  # fmt: skip
        return out
    skinny_gemm_kernel[(programs,)](
        _described(x_NK, tiles.rows, tiles.depth),
        _described(weight_MK, tiles.columns, tiles.depth),
        out, limit, rows, columns, inner,
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, TURNED=tiles.transposed,
        ACTIVATION=activation, num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip
    return out


def _described(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Describe tiles of a matrix for tensor-memory copies."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])
