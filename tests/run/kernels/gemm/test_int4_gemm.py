"""Products with weights of four bits agree with the numbers that the codes stand for."""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.gemm.int4_gemm import (
    dequantize_int4,
    int4_linear,
    quantize_int4,
    select_group_size,
)
from tests.run.kernels.exactness import DEVICE, drawn, error


@pytest.mark.parametrize("inputs", [256, 192, 96])
def test_codes_stand_for_the_nearest_of_sixteen_numbers(inputs: int) -> None:
    weight = drawn(5, inputs)
    matrix = quantize_int4(weight)
    group = select_group_size(inputs)
    assert group is not None
    assert matrix.group_size == group
    assert matrix.codes.numel() == weight.numel() // 2
    far = (dequantize_int4(matrix) - weight).unflatten(1, (-1, group)).abs().amax(-1)
    assert (far <= matrix.scale * 0.501).all()


def test_sixteen_numbers_that_lie_evenly_are_kept() -> None:
    weight = (torch.arange(256).view(2, 128) % 16 - 5.0).to(DEVICE)
    assert torch.equal(dequantize_int4(quantize_int4(weight)), weight)
    assert torch.equal(dequantize_int4(quantize_int4(torch.zeros(2, 128))), torch.zeros(2, 128))


# Triton's interpreter multiplies no matrices of bfloat16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 70, 256), (19, 64, 96)])
def test_products_are_exact(dtype: torch.dtype, tokens: int, outputs: int, inputs: int) -> None:
    x, bias = drawn(tokens, inputs, dtype=dtype), drawn(outputs, dtype=dtype, seed=2)
    matrix = quantize_int4(drawn(outputs, inputs, dtype=dtype, seed=1))
    exact = matrix._replace(scale=matrix.scale.double(), offset=matrix.offset.double())
    wanted = x.double() @ dequantize_int4(exact).t() + bias.double()
    found = int4_linear(x, matrix, bias, backend="triton")
    assert error(found, wanted) < (5e-6 if dtype == torch.float32 else 2**-8)
    plain = int4_linear(x, matrix, bias, backend="torch")
    assert error(plain, wanted) < (5e-6 if dtype == torch.float32 else 2**-6)


def test_rows_that_no_group_divides_are_refused() -> None:
    assert select_group_size(40) is None
    with pytest.raises(InputError, match="multiple of 32"):
        quantize_int4(drawn(2, 40))
