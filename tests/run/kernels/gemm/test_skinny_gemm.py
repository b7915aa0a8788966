"""Products of few rows, plain and gated, agree with float64, however they are cut."""

from typing import get_args

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.activation.glu import glu_reference
from meshwright.run.kernels.gemm.skinny_gemm import (
    GLU_TILES,
    LINEAR_TILES,
    MAX_ROWS,
    SkinnyGemmTable,
    SkinnyGemmTiles,
    find_row_bucket,
    is_skinny_gemm_supported,
    select_skinny_tiles,
    skinny_glu,
    skinny_linear,
)
from meshwright.spec.model.feedforward import Activation
from tests.run.kernels.exactness import DEVICE, drawn, error

# Triton's interpreter multiplies bfloat16 as if it were integers; float16 takes the same code.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
ROUNDING = float(torch.finfo(DTYPE).eps)
WAYS: tuple[SkinnyGemmTiles, ...] = (
    SkinnyGemmTiles(16, 32, 128, warps=4, stages=3),
    SkinnyGemmTiles(32, 64, 64, warps=4, stages=3, transposed=True),
)
if DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0):
    # Of fewer steps than stages, and of more.
    WAYS += (
        SkinnyGemmTiles(64, 32, 128, warps=4, stages=4, prefetches_weight=True),
        SkinnyGemmTiles(16, 64, 64, warps=4, stages=3, transposed=True, prefetches_weight=True),
        SkinnyGemmTiles(128, 64, 64, warps=8, stages=2, prefetches_weight=True),
    )


@pytest.mark.parametrize("tiles", WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_both_products_round_once(rows: int, tiles: SkinnyGemmTiles) -> None:
    # Columns that are no multiple of a tile's: behind the last of the gate begins up.
    x, weight = drawn(rows, 256, dtype=DTYPE), drawn(2 * 72, 256, dtype=DTYPE, seed=1) / 8
    exact = x.double() @ weight.double().t()  # and the weight is not what was written last
    assert error(skinny_linear(x, weight, tiles=tiles, backend="triton"), exact) < ROUNDING
    found = skinny_glu(x, weight, "silu", tiles=tiles, backend="triton")
    assert found.shape == (rows, 72)
    assert error(found, glu_reference(exact, "silu")) < ROUNDING


@pytest.mark.parametrize("activation", get_args(Activation))
def test_every_activation_gates(activation: Activation) -> None:
    x, weight = drawn(3, 256, dtype=DTYPE), drawn(2 * 32, 256, dtype=DTYPE, seed=1) / 4
    limit = 2.0 if activation == "swiglu-clamped" else None
    found = skinny_glu(x, weight, activation, limit=limit, tiles=WAYS[0], backend="triton")
    exact = glu_reference(x.double() @ weight.double().t(), activation, limit=limit)
    assert error(found, exact) < ROUNDING


def test_without_triton_torch_does_the_same() -> None:
    x, weight = drawn(5, 256, dtype=DTYPE), drawn(64, 256, dtype=DTYPE, seed=1) / 8
    exact = x.double() @ weight.double().t()
    assert error(skinny_linear(x, weight, backend="torch"), exact) < ROUNDING
    found = skinny_glu(x, weight, "gelu", backend="torch")
    assert error(found, glu_reference(exact, "gelu")) < 4 * ROUNDING


def test_every_number_of_rows_up_to_the_most_has_tiles() -> None:
    assert set(LINEAR_TILES) == set(GLU_TILES)
    assert [find_row_bucket(rows) for rows in (1, 16, 17, 128)] == [16, 16, 32, 128]
    assert find_row_bucket(MAX_ROWS + 1) is None


@pytest.mark.parametrize("table", [LINEAR_TILES, GLU_TILES], ids=["plain", "gated"])
def test_small_results_are_never_cut_wider(table: SkinnyGemmTable) -> None:
    for rows in table:
        wide, narrow = select_skinny_tiles(table, rows, 2**20), select_skinny_tiles(table, rows, 64)
        assert narrow.columns <= wide.columns


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 256),
        torch.zeros(MAX_ROWS + 1, 256, dtype=DTYPE),
        torch.zeros(2, 128, dtype=DTYPE),
        torch.zeros(256, 2, dtype=DTYPE).t(),
    ],
    ids=["single", "many", "narrow", "turned"],
)
def test_what_the_kernel_does_not_read_is_refused(x: torch.Tensor) -> None:
    weight = torch.zeros(16, x.shape[1], dtype=DTYPE)
    assert not is_skinny_gemm_supported(x, weight)
    with pytest.raises(InputError):
        skinny_linear(x, weight)


def test_halves_that_are_not_equal_are_refused() -> None:
    with pytest.raises(InputError, match="halves"):
        skinny_glu(torch.zeros(2, 256, dtype=DTYPE), torch.zeros(15, 256, dtype=DTYPE), "silu")
