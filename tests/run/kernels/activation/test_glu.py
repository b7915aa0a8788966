"""Gated linear units and their gradients agree with float64, for every activation of a model."""

from typing import get_args

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.activation.glu import glu, glu_reference
from meshwright.spec.model.feedforward import Activation
from tests.run.kernels.exactness import DEVICE, assert_near, doubled, drawn

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_both_gradients_are_exact_to_the_last_place(
    dtype: torch.dtype, activation: Activation
) -> None:
    gate_up = (drawn(2, 3, 2 * 24, dtype=dtype) * 3).requires_grad_()
    dgated = drawn(2, 3, 24, dtype=dtype, seed=1)
    # Low enough that the clamp bites.
    limit = 2.0 if activation == "swiglu-clamped" else None
    gated = glu(gate_up, activation, limit=limit, backend="triton")
    (dgate_up,) = torch.autograd.grad(gated, gate_up, dgated)
    exact_gate_up = doubled(gate_up)
    exact = glu_reference(exact_gate_up, activation, limit=limit)
    (exact_dgate_up,) = torch.autograd.grad(exact, exact_gate_up, dgated.double())
    assert_near(gated, exact)
    assert_near(dgate_up, exact_dgate_up)


def test_rows_wider_than_a_tile_and_not_a_multiple_of_it_are_exact() -> None:
    gate_up = drawn(2, 2 * 2056).requires_grad_()
    dgated = drawn(2, 2056, seed=1)
    gated = glu(gate_up, "silu", backend="triton")
    (dgate_up,) = torch.autograd.grad(gated, gate_up, dgated)
    exact_gate_up = doubled(gate_up)
    exact = glu_reference(exact_gate_up, "silu")
    (exact_dgate_up,) = torch.autograd.grad(exact, exact_gate_up, dgated.double())
    assert_near(gated, exact)
    assert_near(dgate_up, exact_dgate_up)


def test_clamped_swiglu_is_that_of_gpt_oss() -> None:
    gate_up = torch.tensor([9.0, -9.0, 1.0, 8.0, -8.0, 0.5])
    gate, up = torch.tensor([7.0, -9.0, 1.0]), torch.tensor([7.0, -7.0, 0.5])
    wanted = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(glu_reference(gate_up, "swiglu-clamped"), wanted)


@pytest.mark.parametrize("activation", ["relu", "swiglu-clamped"])
def test_a_number_that_is_none_stays_none(activation: Activation) -> None:
    gate_up = torch.tensor([float("nan"), 1.0, 2.0, float("nan")], device=DEVICE)
    assert glu(gate_up, activation, backend="triton").isnan().all()


def test_strided_argument_and_gradient_are_taken_as_they_are() -> None:
    gate_up = drawn(16, 3).t().requires_grad_()
    dgated = drawn(8, 3, seed=1).t()
    (got,) = torch.autograd.grad(glu(gate_up, "silu", backend="triton"), gate_up, dgated)
    (wanted,) = torch.autograd.grad(glu_reference(gate_up, "silu"), gate_up, dgated)
    torch.testing.assert_close(got, wanted)


def test_no_rows_give_no_result() -> None:
    gate_up = drawn(0, 8).requires_grad_()
    gated = glu(gate_up, "silu", backend="triton")
    (dgate_up,) = torch.autograd.grad(gated, gate_up, gated.detach())
    assert gated.shape == (0, 4)
    assert dgate_up.shape == (0, 8)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        glu(drawn(2, 5), "swish", limit=3.0)  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == [
        "activation",
        "limit",
        "gate_up",
    ]
