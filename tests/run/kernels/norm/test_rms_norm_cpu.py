"""What a processor runs agrees with the references, forward and backward."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")

import torch
from torch import Tensor

from meshwright.run.kernels.norm.rms_norm import rms_norm_reference
from meshwright.run.kernels.norm.rms_norm_cpu import rms_norm_cpu
from meshwright.run.kernels.rotary.rotary import (
    apply_rotary_reference,
    split_qkv_apply_rotary_reference,
)
from meshwright.run.kernels.rotary.rotary_cpu import apply_rotary_cpu, split_qkv_apply_rotary_cpu

B, T, H, K, E = 2, 5, 3, 1, 8
EPS = 1e-6


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def angles(pairs: int) -> tuple[Tensor, Tensor]:
    turns = torch.arange(T, dtype=torch.float64)[:, None] * torch.arange(1, pairs + 1)
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("unit_offset", [True, False])
def test_a_norm_and_its_gradients_are_those_of_the_reference(
    weighted: bool, unit_offset: bool
) -> None:
    x, slope = drawn(B, T, H, E), drawn(B, T, H, E, seed=2).detach()
    weight = drawn(E, seed=1) if weighted else None
    leaves = [x] if weight is None else [x, weight]
    found = rms_norm_cpu(x, weight, EPS, unit_offset=unit_offset)
    wanted = rms_norm_reference(x, weight, EPS, unit_offset=unit_offset)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, slope), torch.autograd.grad(wanted, leaves, slope)
    )


def test_a_norm_takes_heads_as_they_lie_in_a_product() -> None:
    x = drawn(B, T, H + 2, E)[..., :H, :]
    weight = drawn(E, seed=1)
    torch.testing.assert_close(
        rms_norm_cpu(x, weight, EPS, unit_offset=False), rms_norm_reference(x, weight, EPS)
    )


def test_sixteen_bits_are_normed_in_float32_and_rounded_once() -> None:
    x, weight = drawn(B, T, E, dtype=torch.bfloat16), drawn(E, dtype=torch.bfloat16, seed=1)
    slope = drawn(B, T, E, dtype=torch.bfloat16, seed=2).detach()
    exact_x, exact_weight = (each.detach().double().requires_grad_() for each in (x, weight))
    found = rms_norm_cpu(x, weight, EPS, unit_offset=False)
    exact = rms_norm_reference(exact_x, exact_weight, EPS)
    ours = (found, *torch.autograd.grad(found, (x, weight), slope))
    wanted = (exact, *torch.autograd.grad(exact, (exact_x, exact_weight), slope.double()))
    for mine, theirs in zip(ours, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [4, 2])
def test_a_rotation_and_its_gradient_are_those_of_the_reference(
    interleaved: bool, pairs: int
) -> None:
    x, slope = drawn(B, T, H, E), drawn(B, T, H, E, seed=2).detach()
    found = apply_rotary_cpu(x, *angles(pairs), interleaved=interleaved)
    wanted = apply_rotary_reference(x, *angles(pairs), interleaved=interleaved)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, x, slope), torch.autograd.grad(wanted, x, slope)
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_split_product_and_its_gradient_are_those_of_the_reference(
    interleaved: bool, dtype: torch.dtype
) -> None:
    qkv = drawn(B, T, (H + 2 * K) * E, dtype=dtype)
    cos, sin = (each.float() for each in angles(E // 2))
    found = split_qkv_apply_rotary_cpu(qkv, H, K, cos, sin, interleaved=interleaved)
    wanted = split_qkv_apply_rotary_reference(qkv, H, K, E, cos, sin, interleaved)
    torch.testing.assert_close(found, wanted)
    slopes = [drawn(*each.shape, dtype=dtype, seed=3).detach() for each in wanted]
    torch.testing.assert_close(
        torch.autograd.grad(found, qkv, slopes), torch.autograd.grad(wanted, qkv, slopes)
    )
