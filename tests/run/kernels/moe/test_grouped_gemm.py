"""Letters: N rows, X groups, O fan out, I fan in."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.kernels.moe import grouped_gemm_kernel
from meshwright.run.kernels.moe.grouped_gemm import (
    GroupedGemmCase,
    GroupedGemmKernel,
    grouped_dgrad,
    grouped_forward,
    grouped_gemm,
    grouped_gemm_reference,
    grouped_wgrad,
    select_grouped_gemm_kernel,
)
from meshwright.run.kernels.moe.grouped_gemm_kernel import GroupedGemmTiles

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SMALL = GroupedGemmTiles(16, 16, 16, warps=4, stages=2)
# Triton's interpreter multiplies bfloat16 as if it were integers; float16 takes the same code.
DTYPES = (torch.float32, torch.bfloat16 if GPU else torch.float16)
SIZES = ((3, 0, 21, 16, 1), (0, 0, 7, 0), (33,))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(grouped_gemm_kernel, "select_grouped_tiles", lambda _: SMALL)


def operands(
    sizes: tuple[int, ...], fan_in: int, fan_out: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    rows = sum(sizes)
    x = torch.randn(rows, fan_in, dtype=torch.float64)
    weight = torch.randn(len(sizes), fan_out, fan_in, dtype=torch.float64) / fan_in**0.5
    bias = torch.randn(len(sizes), fan_out, dtype=torch.float64)
    dy = torch.randn(rows, fan_out, dtype=torch.float64)
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=DEVICE)
    numbers = [each.to(DEVICE, dtype) for each in (x, weight, bias, dy)]
    return numbers[0], numbers[1], numbers[2], numbers[3], ends


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Compare with float64: one rounding of the result is allowed, and float32's of the sum."""
    eps = torch.finfo(found.dtype).eps
    scale = wanted.abs().max().clamp(min=1.0)
    assert found.shape == wanted.shape
    assert ((found.double() - wanted).abs().max() / scale).item() < max(eps, 2e-6)


def gradients(
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor], *leaves: Tensor, dy: Tensor
) -> tuple[Tensor, ...]:
    held = [each.detach().clone().requires_grad_() for each in leaves]
    y = multiply(held[0], held[1], held[2])
    return (y.detach(), *torch.autograd.grad(y, held, dy))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_triton_computes_what_float64_does(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias, dy, ends = operands(sizes, 24, 40, dtype)
    ours = gradients(
        lambda x, w, b: grouped_gemm(x, w, ends, bias_XO=b, backend="triton"),
        *(x, weight, bias),
        dy=dy,
    )
    exact = gradients(
        lambda x, w, b: grouped_gemm_reference(x, w, ends, b),
        *(x.double(), weight.double(), bias.double()),
        dy=dy.double(),
    )
    for found, wanted in zip(ours, exact, strict=True):
        assert_near(found, wanted)


def test_widths_that_copies_cannot_take_are_widened() -> None:
    x, weight, _, dy, ends = operands((5, 18), 19, 23, torch.float32)
    exact = grouped_forward("reference", x.double(), weight.double(), ends)
    assert_near(grouped_forward("triton", x, weight, ends), exact)
    exact = grouped_dgrad("reference", dy.double(), weight.double(), ends)
    assert_near(grouped_dgrad("triton", dy, weight, ends), exact)
    exact = grouped_wgrad("reference", dy.double(), x.double(), ends)
    assert_near(grouped_wgrad("triton", dy, x, ends), exact)


def test_a_group_never_sees_the_numbers_of_its_neighbour() -> None:
    x, weight, _, dy, ends = operands((5, 18), 16, 16, torch.float32)
    poison = slice(5, 23)
    x[poison], dy[poison], weight[1] = torch.nan, torch.nan, torch.nan
    assert grouped_forward("triton", x, weight, ends)[:5].isfinite().all()
    assert grouped_dgrad("triton", dy, weight, ends)[:5].isfinite().all()
    assert grouped_wgrad("triton", dy, x, ends)[0].isfinite().all()


def test_an_empty_group_has_a_gradient_of_zero() -> None:
    x, _, _, dy, ends = operands((4, 0, 6), 8, 8, torch.float32)
    for kernel in ("reference", "triton"):
        assert grouped_wgrad(kernel, dy, x, ends)[1].count_nonzero().item() == 0


def test_no_rows_at_all_give_empty_products_and_gradients_of_zero() -> None:
    x, weight, _, dy, ends = operands((0, 0), 8, 12, torch.float32)
    assert grouped_forward("triton", x, weight, ends).shape == (0, 12)
    assert grouped_dgrad("triton", dy, weight, ends).shape == (0, 8)
    assert torch.equal(grouped_wgrad("triton", dy, x, ends), torch.zeros_like(weight))


def test_equal_inputs_give_equal_bits() -> None:
    x, weight, _, dy, ends = operands((9, 30, 2), 16, 16, DTYPES[1])
    first = grouped_wgrad("triton", dy, x, ends)
    assert torch.equal(first, grouped_wgrad("triton", dy, x, ends))
    y = grouped_forward("triton", x, weight, ends)
    assert torch.equal(y, grouped_forward("triton", x, weight, ends))


def test_the_plain_product_differentiates_as_finite_differences_do() -> None:
    x, weight, bias, _, ends = operands((2, 0, 3), 3, 2, torch.float64)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: grouped_gemm_reference(x, w, ends, b), leaves)


HOPPER = GroupedGemmCase("forward", torch.bfloat16, 128, 2048, 1536, capability=(9, 0))


@pytest.mark.parametrize(
    ("case", "kernel", "reason"),
    [
        (HOPPER._replace(capability=None), "reference", "no GPU"),
        (HOPPER._replace(dtype=torch.float32), "triton", "bfloat16"),
        (HOPPER._replace(capability=(8, 0)), "triton", "waits for the host"),
        (HOPPER._replace(fan_out=1531), "triton", "multiples of 8"),
        (HOPPER._replace(groups=1024), "triton", "1024 groups"),
        (HOPPER._replace(has_bias=True), "triton", "bias"),
        (HOPPER, "triton", "measured faster on an H200"),
        (HOPPER._replace(kind="wgrad"), "triton", "measured faster on an H200"),
        (HOPPER._replace(capability=(10, 0)), "library", "not measured there"),
    ],
)
def test_the_choice_says_why(case: GroupedGemmCase, kernel: GroupedGemmKernel, reason: str) -> None:
    choice = select_grouped_gemm_kernel(case)
    assert choice.kernel == kernel
    assert reason in choice.reason


@pytest.mark.skipif(not GPU, reason="torch's grouped_mm for GPUs needs one")
def test_the_library_computes_what_float64_does() -> None:
    x, weight, _, dy, ends = operands((100, 0, 300, 17), 256, 512, torch.bfloat16)
    exact = grouped_forward("reference", x.double(), weight.double(), ends)
    assert_near(grouped_forward("library", x, weight, ends), exact)
    exact = grouped_dgrad("reference", dy.double(), weight.double(), ends)
    assert_near(grouped_dgrad("library", dy, weight, ends), exact)
    exact = grouped_wgrad("reference", dy.double(), x.double(), ends)
    assert_near(grouped_wgrad("library", dy, x, ends), exact)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, weight, bias, _, ends = operands((2, 3), 4, 6, torch.float32)
    with pytest.raises(InputError, match=r"rows \(5, 3\) do not fit"):
        grouped_gemm(x[:, :3], weight, ends)
    with pytest.raises(InputError, match="one int32 end for each group"):
        grouped_gemm(x, weight, ends.long())
    with pytest.raises(InputError, match=r"use \(2, 6\)"):
        grouped_gemm(x, weight, ends, bias_XO=bias[:, :5])
