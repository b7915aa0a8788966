"""What a matrix in fp8 must keep: its numbers to the format's precision, in the asked layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.fp8 import quantization_launch
from meshwright.run.kernels.fp8.quantization import (
    E4M3,
    E5M2,
    Fp8Matrix,
    dequantize,
    quantize_blockwise,
    quantize_rowwise,
    quantize_tensorwise,
    quantize_transposed,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Quantize = Callable[..., Any]  # a Quantized, of which the tests ask for both copies

WAYS: dict[str, Quantize] = {
    "tensor": quantize_tensorwise,
    "row": quantize_rowwise,
    "1x128": partial(quantize_blockwise, block="1x128"),
    "128x128": partial(quantize_blockwise, block="128x128"),
}
every_way = pytest.mark.parametrize("way", WAYS)
every_backend = pytest.mark.parametrize("backend", ["triton", "torch"])


def _made(height: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers over many magnitudes, with a row, a column and a block of zeros."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(height, width, generator=random)
    x *= torch.exp(2 * torch.randn(height, 1, generator=random))
    x *= torch.exp(2 * torch.randn(1, width, generator=random))
    x[1], x[:, 2] = 0, 0
    x[128:256, 128:256] = 0
    return x.to(DEVICE, dtype)


def _largest_error(x: torch.Tensor, operand: Fp8Matrix) -> float:
    """The error of each element, in units of what rounding alone may cause."""
    kind = torch.finfo(operand.data.dtype)
    unit = Fp8Matrix(torch.ones_like(operand.data), operand.scale, operand.scaling)
    spacing = dequantize(unit).double() * kind.smallest_normal * kind.eps / 2
    # Scales are float32 themselves: a little more than half a step of the format.
    allowed = torch.maximum(x.double().abs() * (kind.eps / 2), spacing) * (1 + 1e-5)
    return float(((dequantize(operand).double() - x.double()).abs() / allowed).max())


@every_way
@every_backend
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(48, 64), (37, 50), (130, 272), (256, 384)], ids=str)
def test_numbers_are_rounded_to_the_nearest_of_the_format(
    way: str, backend: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = _made(*shape)
    made = WAYS[way](x, dtype=dtype, transpose=True, backend=backend)
    assert made.transposed is not None
    assert made.direct.data.dtype == made.transposed.data.dtype == dtype
    assert _largest_error(x, made.direct) <= 1
    assert _largest_error(x.t(), made.transposed) <= 1


@every_way
@every_backend
def test_both_copies_are_contiguous_along_what_is_summed(way: str, backend: str) -> None:
    made = WAYS[way](_made(160, 144), transpose=True, backend=backend)
    assert made.transposed is not None
    assert (made.direct.data.shape, made.direct.data.stride()) == ((160, 144), (144, 1))
    assert (made.transposed.data.shape, made.transposed.data.stride()) == ((144, 160), (160, 1))


@every_way
@every_backend
def test_the_transposed_copy_is_made_only_where_asked_for(way: str, backend: str) -> None:
    x = _made(32, 48)
    alone, both = (WAYS[way](x, transpose=turn, backend=backend) for turn in (False, True))
    assert alone.transposed is None
    assert torch.equal(alone.direct.data.float(), both.direct.data.float())
    assert torch.equal(alone.direct.scale, both.direct.scale)


@every_way
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's division may differ in the last bit")
def test_kernels_write_what_torch_writes(way: str, power_of_two: bool, dtype: torch.dtype) -> None:
    x = _made(140, 200, dtype)
    found, wanted = (
        WAYS[way](x, transpose=True, power_of_two=power_of_two, backend=backend)
        for backend in ("triton", "torch")
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.data.float(), other.data.float())
        assert torch.equal(one.scale, other.scale)
        assert one.scale.stride() == other.scale.stride()


@every_way
@every_backend
def test_scales_can_be_powers_of_two(way: str, backend: str) -> None:
    x = _made(140, 150)
    made = WAYS[way](x, transpose=True, power_of_two=True, backend=backend)
    for operand, given in zip(made, (x, x.t()), strict=True):
        mantissa, _ = torch.frexp(operand.scale)
        assert set(mantissa.flatten().tolist()) <= {0.5, 0.0}  # 0 pads rows of 128×128 scales
        assert _largest_error(given, operand) <= 1


@every_way
@every_backend
@pytest.mark.parametrize("number", [0.0, 1e-38, 3e38])
def test_constant_matrices_come_back(way: str, backend: str, number: float) -> None:
    x = torch.full((16, 130), number, device=DEVICE, dtype=torch.bfloat16)
    back = dequantize(WAYS[way](x, transpose=True, backend=backend).direct)
    # Below 2^-100 numbers lie on the grid of the least scale.
    torch.testing.assert_close(back, x.float(), rtol=1e-6, atol=1e-30)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # interpreted
@every_way
@every_backend
@pytest.mark.parametrize("shape", [(20, 30), (128, 128)], ids=str)  # part of a tile, and whole
def test_nan_stays_nan_and_infinity_is_not_hidden(
    way: str, backend: str, shape: tuple[int, int]
) -> None:
    x = _made(*shape)
    x[3, 4], x[5, 6] = float("nan"), float("inf")
    made = WAYS[way](x, transpose=True, backend=backend)
    for operand, (a, b) in zip(made, ((3, 4), (4, 3)), strict=True):
        assert dequantize(operand)[a, b].isnan()
    other = dequantize(made.direct)[5, 6]
    assert not other.isfinite()


@every_backend
def test_a_given_amax_is_used(backend: str) -> None:
    x = _made(16, 32)
    amax = torch.tensor([2.0], device=DEVICE)
    made = quantize_tensorwise(x, amax=amax, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(made.direct.scale, amax / 448)
    # Larger numbers saturate.
    torch.testing.assert_close(dequantize(made.direct).abs().max(), amax[0])


def test_amax_is_found_in_the_last_and_shorter_stretch() -> None:
    x = torch.zeros(3, 2 * quantization_launch.AMAX_BLOCK // 5, device=DEVICE, dtype=torch.bfloat16)
    x[2, -1] = -7.0
    scale = quantize_tensorwise(x, backend="triton").direct.scale
    torch.testing.assert_close(scale * 448, torch.tensor([7.0], device=DEVICE))


@every_way
@every_backend
@pytest.mark.parametrize("shape", [(128, 256), (37, 50)], ids=str)
def test_the_transposed_copy_alone_is_the_one_beside_a_direct_copy(
    way: str, backend: Any, shape: tuple[int, int]
) -> None:
    x = _made(*shape)
    beside = WAYS[way](x, transpose=True, backend=backend).transposed
    alone = quantize_transposed(x, way, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(alone.data.float(), beside.data.float())
    assert torch.equal(alone.scale, beside.scale)
    assert (alone.scaling, alone.scale.stride()) == (beside.scaling, beside.scale.stride())


@every_backend
def test_a_transposed_copy_takes_the_scale_of_an_earlier_copy(backend: Any) -> None:
    x = _made(48, 64)
    scale = torch.tensor([0.5], device=DEVICE)
    made = quantize_transposed(x.clamp(-9, 9), "tensor", scale=scale, backend=backend)
    assert made.scale is scale
    assert _largest_error(x.clamp(-9, 9).t(), made) <= 1
    with pytest.raises(InputError, match="leave it out"):
        quantize_transposed(x, "row", scale=scale, backend=backend)


@every_way
@every_backend
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # interpreted
def test_nan_reaches_all_that_shares_its_scale(way: str, backend: Any, power_of_two: bool) -> None:
    x = torch.ones(4, 16, device=DEVICE, dtype=torch.bfloat16)
    x[1, 3] = float("nan")
    made = WAYS[way](x, backend=backend, power_of_two=power_of_two)
    assert dequantize(made.direct)[1].isnan().all()


@every_backend
def test_each_row_and_column_has_its_own_scale(backend: str) -> None:
    x = _made(520, 24, torch.float32)
    made = quantize_rowwise(x, transpose=True, backend=backend)  # type: ignore[arg-type]
    assert made.transposed is not None
    rows, columns = x.abs().amax(1, keepdim=True), x.abs().amax(0)[:, None]
    torch.testing.assert_close(made.direct.scale * 448, rows, rtol=1e-6, atol=1e-25)
    torch.testing.assert_close(made.transposed.scale * 448, columns, rtol=1e-6, atol=1e-25)


@every_backend
def test_scales_of_blocks_lie_as_hopper_reads_them(backend: str) -> None:
    x = _made(256, 640)
    lines = quantize_blockwise(x, "1x128", transpose=True, backend=backend)  # type: ignore[arg-type]
    squares = quantize_blockwise(x, "128x128", transpose=True, backend=backend)  # type: ignore[arg-type]
    assert lines.transposed is not None
    assert squares.transposed is not None
    assert (lines.direct.scale.shape, lines.direct.scale.stride()) == ((256, 5), (1, 256))
    assert (lines.transposed.scale.shape, lines.transposed.scale.stride()) == ((640, 2), (1, 640))
    assert (squares.direct.scale.shape, squares.direct.scale.stride()) == ((8, 2), (1, 8))
    assert (squares.transposed.scale.shape, squares.transposed.scale.stride()) == ((4, 5), (1, 4))


def test_strided_input_is_read_rightly() -> None:
    x = _made(32, 96)[:, 16:48]
    made = quantize_rowwise(x, backend="triton")
    assert _largest_error(x, made.direct) <= 1


def test_only_matrices_are_taken() -> None:
    with pytest.raises(InputError, match="give a matrix"):
        quantize_rowwise(torch.zeros(2, 3, 4))
