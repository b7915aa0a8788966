"""Heads normed and rotated in one kernel agree with float64, as do all three gradients."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.rotary.qk_norm_rope import (
    QKNorms,
    split_qkv_norm_rope,
    split_qkv_norm_rope_reference,
)
from meshwright.run.kernels.rotary.rotary import QKVSizes
from tests.run.kernels.exactness import assert_near, doubled, drawn

B, T, EPS = 2, 2, 1e-6


@pytest.mark.parametrize(
    ("dtype", "sizes", "half", "interleaved", "unit_offset"),
    [
        (torch.float32, QKVSizes(4, 2, 16), 8, False, False),
        (torch.bfloat16, QKVSizes(4, 2, 16), 8, True, False),
        (torch.float32, QKVSizes(3, 1, 24), 6, True, True),
        (torch.bfloat16, QKVSizes(3, 1, 24), 6, False, True),
    ],
)
def test_heads_and_gradients_are_exact_to_the_last_place(
    dtype: torch.dtype, sizes: QKVSizes, half: int, interleaved: bool, unit_offset: bool
) -> None:
    angles = drawn(B, T, half, seed=9) if unit_offset else drawn(T, half, seed=9)
    cos, sin = angles.cos(), angles.sin()
    qkv = drawn(B, T, sizes.width, dtype=dtype).requires_grad_()
    weights = [
        drawn(sizes.head_dim, dtype=dtype, seed=seed).requires_grad_() for seed in range(1, 3)
    ]
    grads = (
        drawn(B, sizes.heads, T, sizes.head_dim, dtype=dtype, seed=4).transpose(1, 2),
        drawn(B, T, sizes.kv_heads, sizes.head_dim, dtype=dtype, seed=5),
        drawn(B, T, sizes.kv_heads, 2 * sizes.head_dim, dtype=dtype, seed=6)[..., ::2],
    )
    norms = QKNorms(weights[0], weights[1], EPS, unit_offset)
    three = split_qkv_norm_rope(
        qkv, *sizes, cos, sin, norms, interleaved=interleaved, backend="triton"
    )
    got = torch.autograd.grad(three, (qkv, *weights), grads)
    exact_inputs = [doubled(each) for each in (qkv, *weights)]
    exact_norms = QKNorms(exact_inputs[1], exact_inputs[2], EPS, unit_offset)
    exact = split_qkv_norm_rope_reference(
        exact_inputs[0], sizes, cos, sin, exact_norms, interleaved=interleaved
    )
    wanted = torch.autograd.grad(exact, exact_inputs, [each.double() for each in grads])
    for one, two in zip((*three, *got), (*exact, *wanted), strict=True):
        assert_near(one, two)


def test_sequences_of_many_tiles_and_a_part_of_one_are_exact() -> None:
    # Tiles of two tokens and two heads: each of five shares of the heads has four programs.
    sizes, positions = QKVSizes(6, 2, 512), 11
    angles = drawn(positions, 256, seed=9)
    qkv = drawn(1, positions, sizes.width).requires_grad_()
    weights = [drawn(512, seed=seed).requires_grad_() for seed in range(1, 3)]
    three = split_qkv_norm_rope(
        qkv,
        *sizes,
        angles.cos(),
        angles.sin(),
        QKNorms(weights[0], weights[1], EPS),
        backend="triton",
    )
    grads = [drawn(1, positions, number, 512, seed=4) for number in (6, 2, 2)]
    got = torch.autograd.grad(three, (qkv, *weights), grads)
    exact_inputs = [doubled(each) for each in (qkv, *weights)]
    exact_norms = QKNorms(exact_inputs[1], exact_inputs[2], EPS)
    exact = split_qkv_norm_rope_reference(
        exact_inputs[0], sizes, angles.cos(), angles.sin(), exact_norms
    )
    wanted = torch.autograd.grad(exact, exact_inputs, [each.double() for each in grads])
    for one, two in zip((*three, *got), (*exact, *wanted), strict=True):
        assert_near(one, two)


def test_heads_too_wide_for_registers_give_the_same() -> None:
    sizes = QKVSizes(3, 1, 4096)
    qkv = drawn(1, 1, sizes.width).requires_grad_()
    norms = QKNorms(drawn(4096, seed=1), drawn(4096, seed=2), EPS)
    angles = drawn(1, 8)
    three = split_qkv_norm_rope(qkv, *sizes, angles.cos(), angles.sin(), norms, backend="triton")
    wanted = split_qkv_norm_rope_reference(qkv, sizes, angles.cos(), angles.sin(), norms)
    for one, two in zip(three, wanted, strict=True):
        assert_near(one, two.double())


def test_the_projection_keeps_its_value() -> None:
    qkv, norms = drawn(B, T, 8 * 16), QKNorms(drawn(16), drawn(16, seed=1), EPS)
    before = qkv.clone()
    split_qkv_norm_rope(qkv, 4, 2, 16, drawn(T, 8), drawn(T, 8), norms, backend="triton")
    assert torch.equal(qkv, before)


def test_weights_of_another_width_are_refused() -> None:
    norms = QKNorms(drawn(16), drawn(8), EPS)
    with pytest.raises(InputError, match=r"k_weight: shape \(8,\) for heads of 16"):
        split_qkv_norm_rope(drawn(B, T, 8 * 16), 4, 2, 16, drawn(T, 8), drawn(T, 8), norms)
