"""Root-mean-square norms and their gradients agree with float64, for wide rows and short ones."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.norm.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from tests.run.kernels.exactness import DEVICE, assert_near, doubled, drawn

EPS = 1e-5
TYPES = (torch.float32, torch.bfloat16)


def _leaf(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return drawn(*shape, dtype=dtype, seed=seed).requires_grad_()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [3, 24, 64, 1030])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norm_and_gradients_are_exact_to_the_last_place(
    dtype: torch.dtype, width: int, unit_offset: bool
) -> None:
    x, weight = _leaf(2, 5, width, dtype=dtype), _leaf(width, dtype=dtype, seed=1)
    dy = drawn(2, 5, width, dtype=dtype, seed=2)
    y = rms_norm(x, weight, EPS, unit_offset=unit_offset, backend="triton")
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    exact_x, exact_weight = doubled(x), doubled(weight)
    exact = rms_norm_reference(exact_x, exact_weight, EPS, unit_offset=unit_offset)
    exact_dx, exact_dweight = torch.autograd.grad(exact, (exact_x, exact_weight), dy.double())
    assert_near(y, exact)
    assert_near(dx, exact_dx)
    assert_near(dweight, exact_dweight)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(7, 40), (2, 3, 516)])
def test_normed_sum_and_gradients_through_both_results_are_exact(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, residual = _leaf(*shape, dtype=dtype), _leaf(*shape, dtype=dtype, seed=1)
    weight = _leaf(shape[-1], dtype=dtype, seed=2)
    grads = drawn(*shape, dtype=dtype, seed=3), drawn(*shape, dtype=dtype, seed=4)
    normed, total = add_rms_norm(x, residual, weight, EPS, backend="triton")
    dx, dresidual, dweight = torch.autograd.grad((normed, total), (x, residual, weight), grads)
    assert_near(total, x.double() + residual.double())
    # The norm is that of the sum as it was rounded, and so are the gradients.
    exact_total, exact_weight = doubled(total), doubled(weight)
    exact = rms_norm_reference(exact_total, exact_weight, EPS)
    exact_dx, exact_dweight = torch.autograd.grad(
        (exact, exact_total), (exact_total, exact_weight), [each.double() for each in grads]
    )
    assert_near(normed, exact)
    assert_near(dx, exact_dx)
    assert torch.equal(dx, dresidual)
    assert_near(dweight, exact_dweight)


def test_a_sum_that_nobody_normalises_passes_its_gradient_on() -> None:
    x, residual = _leaf(3, 8, dtype=torch.float32), _leaf(3, 8, dtype=torch.float32, seed=1)
    weight, dtotal = _leaf(8, dtype=torch.float32), drawn(3, 8, seed=2)
    _, total = add_rms_norm(x, residual, weight, EPS, backend="triton")
    dx, dweight = torch.autograd.grad(total, (x, weight), dtotal, allow_unused=True)
    assert torch.equal(dx, dtotal)
    assert dweight is None


def test_heads_are_normed_where_they_lie_in_a_fused_projection() -> None:
    qkv = drawn(2, 3, 6 * 16).view(2, 3, 6, 16)
    keys = qkv[:, :, 3:5].detach().requires_grad_()
    weight = _leaf(16, dtype=torch.float32)
    dy = drawn(2, 3, 2, 16, seed=3)
    y = rms_norm(keys, weight, EPS, backend="triton")
    dx, dweight = torch.autograd.grad(y, (keys, weight), dy)
    exact_x, exact_weight = doubled(keys), doubled(weight)
    exact = rms_norm_reference(exact_x, exact_weight, EPS)
    exact_dx, exact_dweight = torch.autograd.grad(exact, (exact_x, exact_weight), dy.double())
    assert_near(y, exact)
    assert_near(dx, exact_dx)
    assert_near(dweight, exact_dweight)


def test_rows_without_a_weight_get_length_root_of_width() -> None:
    x = _leaf(4, 32, dtype=torch.float32)
    y = rms_norm(x, None, 1e-12, backend="triton")
    torch.testing.assert_close(y.norm(dim=-1), torch.full((4,), 32**0.5, device=DEVICE))
    (dx,) = torch.autograd.grad(y, x, y.detach())
    # A row can change its length as it likes without changing its norm.
    assert dx.abs().max() < 1e-5


def test_transposed_input_and_gradient_are_taken_as_they_are() -> None:
    x = drawn(8, 5).t().requires_grad_()
    dy = drawn(8, 5, seed=1).t()
    weight = _leaf(8, dtype=torch.float32)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, EPS, backend="triton"), x, dy)
    (wanted,) = torch.autograd.grad(rms_norm_reference(x, weight, EPS), x, dy)
    torch.testing.assert_close(dx, wanted)


def test_equal_inputs_give_equal_bits() -> None:
    x, weight, dy = (
        _leaf(37, 64, dtype=torch.float32),
        _leaf(64, dtype=torch.float32),
        drawn(37, 64),
    )
    runs = [
        torch.autograd.grad(rms_norm(x, weight, EPS, backend="triton"), (x, weight), dy)
        for _ in range(2)
    ]
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def test_no_rows_give_no_result_and_a_zero_gradient() -> None:
    x, weight = _leaf(0, 16, dtype=torch.float32), _leaf(16, dtype=torch.float32)
    y = rms_norm(x, weight, EPS, backend="triton")
    dx, dweight = torch.autograd.grad(y, (x, weight), y.detach())
    assert y.shape == dx.shape == (0, 16)
    assert not dweight.any()


@pytest.mark.parametrize("dtype", TYPES)
def test_plain_torch_gives_the_same(dtype: torch.dtype) -> None:
    x, residual = drawn(3, 24, dtype=dtype), drawn(3, 24, dtype=dtype, seed=1)
    weight = drawn(24, dtype=dtype, seed=2)
    plain = add_rms_norm_reference(x, residual, weight, EPS)
    for got, wanted in zip(
        add_rms_norm(x, residual, weight, EPS, backend="triton"), plain, strict=True
    ):
        assert_near(got, wanted.double())


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(InputError, match=r"weight: shape \(8,\) for rows of 16"):
        rms_norm(drawn(2, 16), drawn(8), EPS, backend="triton")


def test_rows_too_wide_for_registers_are_refused() -> None:
    with pytest.raises(InputError, match="rows of 20000 elements"):
        rms_norm(drawn(1, 20000), None, EPS, backend="triton")


def test_a_residual_of_another_type_is_refused() -> None:
    with pytest.raises(InputError, match="residual"):
        add_rms_norm(drawn(2, 4), drawn(2, 4, dtype=torch.bfloat16), None, EPS)
