"""A tensor times a number on the device is exact to the last place of the format asked for."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.loss.scale_tensor import TILE, scale_tensor
from meshwright.run.kernels.triton_compat import KernelBackend
from tests.run.kernels.exactness import DEVICE, assert_near, drawn

FACTOR = torch.tensor(1 / 3, device=DEVICE)
"""Half a last place of bfloat16 away from its nearest bfloat16 number."""


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [1, 7, TILE, 2 * TILE + 13])
def test_product_is_exact_to_the_last_place(
    kind: torch.dtype, dtype: torch.dtype, number: int
) -> None:
    x = drawn(number, dtype=kind)
    got = scale_tensor(x, FACTOR, dtype, backend="triton")
    assert got.dtype == dtype
    assert_near(got, x.double() * FACTOR.double())


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_factor_is_not_rounded_to_the_tensors_format(backend: KernelBackend) -> None:
    x = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    got = scale_tensor(x, FACTOR, torch.float32, backend=backend)
    assert (got == FACTOR).all()


def test_what_is_given_stays_as_it_is() -> None:
    x = drawn(100)
    before = x.clone()
    scale_tensor(x, FACTOR, torch.float32, backend="triton")
    assert torch.equal(x, before)


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_turned_matrices_are_scaled_too(axes: tuple[int, int]) -> None:
    x = drawn(40, 50).permute(axes)
    got = scale_tensor(x, FACTOR, torch.bfloat16, backend="triton")
    assert_near(got, x.double() * FACTOR.double())


def test_double_precision_is_kept() -> None:
    x = drawn(9).double()
    got = scale_tensor(x, FACTOR.double(), torch.float64, backend="triton")
    torch.testing.assert_close(got, x * FACTOR.double(), rtol=1e-15, atol=0)


def test_nothing_gives_nothing() -> None:
    assert scale_tensor(drawn(0, 8), FACTOR, torch.bfloat16, backend="triton").shape == (0, 8)


def test_a_factor_of_several_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="give one number"):
        scale_tensor(drawn(4), drawn(4), torch.float32)


@pytest.mark.skipif(DEVICE == "cpu", reason="four billion bytes of a GPU")
def test_more_than_two_billion_elements_are_scaled_to_the_last() -> None:
    x = torch.ones(2**31 + TILE + 1, dtype=torch.bfloat16, device=DEVICE)
    got = scale_tensor(x, FACTOR, torch.bfloat16, backend="triton")
    assert (got[-2 * TILE :] == FACTOR.bfloat16()).all()
    assert (got[2**31 - TILE : 2**31 + TILE] == FACTOR.bfloat16()).all()
