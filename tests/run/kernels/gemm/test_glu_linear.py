"""A gated unit and its product agree with float64, and keep nothing that lies between them."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.errors import InputError
from meshwright.run.kernels.activation.glu import glu
from meshwright.run.kernels.gemm.glu_linear import glu_linear, glu_linear_reference
from meshwright.run.kernels.triton_compat import KernelBackend
from meshwright.run.nn.linear.linear import linear
from meshwright.spec.model.feedforward import Activation
from tests.run.kernels.exactness import assert_near, doubled, drawn

N, F, M = 3, 20, 12
BACKENDS: tuple[KernelBackend, ...] = ("torch", "triton")


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    gate_up = drawn(2, N, 2 * F, dtype=dtype).requires_grad_()
    weight = drawn(M, F, dtype=dtype, seed=1).requires_grad_()
    return gate_up, weight, drawn(2, N, M, dtype=dtype, seed=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["silu", "relu2", "swiglu-clamped"])
def test_result_and_gradients_are_exact(backend: KernelBackend, activation: Activation) -> None:
    gate_up, weight, dy = _inputs(torch.float32)
    limit = 0.5 if activation == "swiglu-clamped" else None
    y = glu_linear(gate_up, weight, activation, limit=limit, backend=backend)
    got = torch.autograd.grad(y, (gate_up, weight), dy)
    exact_inputs = doubled(gate_up), doubled(weight)
    exact = glu_linear_reference(*exact_inputs, activation, limit=limit)
    wanted = torch.autograd.grad(exact, exact_inputs, dy.double())
    # A product adds up as many roundings as it has terms.
    for one, two in zip((y, *got), (exact, *wanted), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_is_that_of_the_unit_and_the_product_apart(
    backend: KernelBackend, dtype: torch.dtype
) -> None:
    gate_up, weight, dy = _inputs(dtype)
    together = glu_linear(gate_up, weight, "silu", backend=backend)
    apart = linear(glu(gate_up, "silu", backend=backend), weight)
    assert torch.equal(together, apart)
    for one, two in zip(
        torch.autograd.grad(together, (gate_up, weight), dy),
        torch.autograd.grad(apart, (gate_up, weight), dy),
        strict=True,
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_argument_and_the_weight_are_kept(backend: KernelBackend) -> None:
    gate_up, weight, _ = _inputs(torch.float32)
    kept: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.data_ptr())
        return saved

    with saved_tensors_hooks(keep, lambda saved: saved):
        glu_linear(gate_up, weight, "silu", backend=backend)
    assert sorted(kept) == sorted((gate_up.data_ptr(), weight.data_ptr()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_gets_its_gradient_in_the_format_it_was_told(backend: KernelBackend) -> None:
    gate_up, weight, dy = _inputs(torch.bfloat16)
    weight.grad_dtype = torch.float32
    torch.autograd.backward(glu_linear(gate_up, weight, "silu", backend=backend), dy)
    # The weight's gradient is a product with the unit's rounded result.
    act = glu(gate_up.detach(), "silu", backend=backend).double()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert_near(weight.grad, dy.double().flatten(0, 1).t() @ act.flatten(0, 1))
    assert gate_up.grad is not None
    assert gate_up.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_that_is_not_trained_costs_no_gradient(backend: KernelBackend) -> None:
    gate_up, weight, dy = _inputs(torch.float32)
    y = glu_linear(gate_up, weight.detach(), "silu", backend=backend)
    torch.autograd.backward(y, dy)
    assert gate_up.grad is not None
    assert weight.grad is None


def test_a_weight_of_another_width_is_refused() -> None:
    gate_up, weight, _ = _inputs(torch.float32)
    with pytest.raises(InputError, match=r"give it shape \(any, 20\)"):
        glu_linear(gate_up, weight[:, 1:], "silu")
