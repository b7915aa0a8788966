"""Looking rows up, and adding gradients to the rows they came from."""

import pytest
import torch

from meshwright.run.kernels.embedding import embedding, sum_grads_by_row
from meshwright.run.kernels.triton_compat import KernelBackend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _gradient(numbers: torch.Tensor, weight: torch.Tensor, backend: KernelBackend) -> torch.Tensor:
    leaf = weight.clone().requires_grad_()
    out = embedding(numbers, leaf, backend=backend)
    assert torch.equal(out, weight[numbers])
    scale = torch.arange(out.numel(), device=DEVICE).reshape(out.shape).remainder(7).to(out.dtype)
    (out * scale).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 700])
def test_the_gradient_is_that_of_torch(dtype: torch.dtype, width: int) -> None:
    numbers = torch.randint(0, 9, (3, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = torch.randn(12, width, device=DEVICE).to(dtype)
    torch.testing.assert_close(
        _gradient(numbers, weight, "triton"), _gradient(numbers, weight, "torch")
    )


def test_rows_that_nobody_looked_up_get_nothing() -> None:
    numbers = torch.tensor([4, 4, 4], device=DEVICE)
    table = sum_grads_by_row(torch.ones(3, 16, device=DEVICE), numbers, 6, torch.float32)
    assert table.sum(1).tolist() == [0, 0, 0, 0, 48, 0]


def test_sums_are_rounded_once() -> None:
    numbers = torch.zeros(300, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(300, 8, dtype=torch.bfloat16, device=DEVICE)
    assert sum_grads_by_row(ones, numbers, 1, torch.bfloat16)[0, 0] == 300


def test_the_gradient_comes_in_the_format_the_weight_accumulates() -> None:
    weight = torch.randn(5, 16, device=DEVICE).to(torch.bfloat16).requires_grad_()
    weight.grad_dtype = torch.float32
    embedding(torch.tensor([1, 1], device=DEVICE), weight, backend="triton").sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_no_tokens_are_no_gradient() -> None:
    numbers = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert not sum_grads_by_row(torch.zeros(0, 8, device=DEVICE), numbers, 3, torch.float32).any()
