"""The norm of many gradients agrees with float64, and tells where numbers are not finite."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.run.kernels.optimizer.grad_norm import compute_grad_norm, grad_norm_reference
from meshwright.run.kernels.optimizer.multi_tensor import TensorList
from tests.run.kernels.exactness import drawn

# Longer than a chunk, exactly one, shorter, a single element, none.
SIZES = (300, 128, 70, 1, 0)
MIXED = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32)


def _grads(dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    return [drawn(size, dtype=dtype) for size, dtype in zip(SIZES, dtypes, strict=True)]


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 5, (torch.bfloat16,) * 5, MIXED])
def test_norm_is_that_of_all_gradients_in_one_vector(dtypes: tuple[torch.dtype, ...]) -> None:
    grads = _grads(dtypes)
    exact = torch.cat([each.double() for each in grads]).norm()
    listed = TensorList.from_tensors(grads, chunk_elements=128)
    for got in (compute_grad_norm(listed, backend="triton"), grad_norm_reference(grads)):
        assert got.norm.dtype == torch.float32
        assert float((got.norm.double() - exact).abs() / exact) < 1e-6
        assert int(got.nonfinite_count) == 0


def test_gradients_that_begin_between_16_bytes_are_read_right() -> None:
    grads = [drawn(300)[1:], drawn(400, dtype=torch.bfloat16)[3:]]
    exact = torch.cat([each.double() for each in grads]).norm()
    got = compute_grad_norm(TensorList.from_tensors(grads, chunk_elements=128), backend="triton")
    assert float((got.norm.double() - exact).abs() / exact) < 1e-6


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_infinities_and_nan_are_counted(backend: str) -> None:
    grads = _grads(MIXED)
    grads[0][7] = grads[1][127] = float("inf")
    grads[2][69] = float("nan")
    got = compute_grad_norm(grads, backend="triton" if backend == "triton" else "torch")
    assert not torch.isfinite(got.norm)
    assert int(got.nonfinite_count) == 3


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # as interpreted
def test_numbers_whose_squares_overflow_are_not_counted() -> None:
    grads = [torch.full_like(drawn(5), 1e30)]
    got = compute_grad_norm(grads, backend="triton")
    assert torch.isinf(got.norm)
    assert int(got.nonfinite_count) == 0


def test_a_list_sees_what_its_tensors_hold_now() -> None:
    grads = _grads(MIXED)
    listed = TensorList.from_tensors(grads, chunk_elements=128)
    before = compute_grad_norm(listed, backend="triton").norm
    for each in grads:
        each.mul_(2)
    torch.testing.assert_close(compute_grad_norm(listed, backend="triton").norm, 2 * before)


def test_no_gradients_have_norm_zero() -> None:
    got = compute_grad_norm([])
    assert float(got.norm) == 0.0
    assert int(got.nonfinite_count) == 0
