"""Rotary positions agree with float64, in place, out of place, and for gradients of any layout."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.rotary.rotary import (
    apply_rotary,
    apply_rotary_reference,
    split_qkv_apply_rotary,
    split_qkv_apply_rotary_reference,
)
from meshwright.run.kernels.rotary.rotary_kernel import TILE, select_rotary_tile
from tests.run.kernels.exactness import assert_near, doubled, drawn

B, T = 2, 3
TYPES = (torch.float32, torch.bfloat16)
# Query heads, key/value heads, elements of a head, pairs that turn: all of a head, a part of it,
# and numbers that are no powers of two.
SIZES = [(4, 2, 16, 8), (3, 1, 24, 6), (5, 5, 20, 10)]


def _angles(half: int, *, for_each_sequence: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    angles = drawn(B, T, half, seed=9) if for_each_sequence else drawn(T, half, seed=9)
    return angles.cos(), angles.sin()


def _qkv(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    heads, kv_heads, head_dim, _ = sizes
    return drawn(B, T, (heads + 2 * kv_heads) * head_dim, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_split_queries_and_keys_and_their_fused_gradient_are_exact(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], interleaved: bool
) -> None:
    heads, kv_heads, head_dim, half = sizes
    cos, sin = _angles(half, for_each_sequence=heads == 3)
    qkv = _qkv(sizes, dtype)
    three = split_qkv_apply_rotary(
        qkv * 1, heads, kv_heads, head_dim, cos, sin, interleaved=interleaved, backend="triton"
    )
    # Attention kernels hand dq and dk back with positions and heads exchanged, or not.
    grads = (
        drawn(B, heads, T, head_dim, dtype=dtype, seed=1).transpose(1, 2),
        drawn(B, T, kv_heads, head_dim, dtype=dtype, seed=2),
        drawn(T, B, kv_heads, 2 * head_dim, dtype=dtype, seed=3).transpose(0, 1)[..., ::2],
    )
    (dqkv,) = torch.autograd.grad(three, qkv, grads)
    exact_qkv = doubled(qkv)
    exact = split_qkv_apply_rotary_reference(
        exact_qkv, heads, kv_heads, head_dim, cos, sin, interleaved
    )
    (exact_dqkv,) = torch.autograd.grad(exact, exact_qkv, [each.double() for each in grads])
    for got, wanted in zip(three, exact, strict=True):
        assert_near(got, wanted)
    assert dqkv.is_contiguous()
    assert_near(dqkv, exact_dqkv)


def test_sequences_longer_than_a_tile_and_no_multiple_of_it_are_exact() -> None:
    heads, kv_heads, head_dim, positions = 6, 2, 512, 9
    tile = select_rotary_tile(heads, kv_heads, head_dim, TILE)
    assert tile == (4, 2)
    angles = drawn(2, positions, 256, seed=9)
    qkv = drawn(2, positions, 10 * 512).requires_grad_()
    given = heads, kv_heads, head_dim, angles.cos(), angles.sin()
    three = split_qkv_apply_rotary(qkv * 1, *given, backend="triton")
    grads = [
        drawn(2, number, positions, head_dim, seed=1).transpose(1, 2) for number in (heads, 2, 2)
    ]
    (dqkv,) = torch.autograd.grad(three, qkv, grads)
    exact_qkv = doubled(qkv)
    exact = split_qkv_apply_rotary_reference(exact_qkv, *given)
    (exact_dqkv,) = torch.autograd.grad(exact, exact_qkv, [each.double() for each in grads])
    for got, wanted in zip((*three, dqkv), (*exact, exact_dqkv), strict=True):
        assert_near(got, wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_heads_are_rotated_into_a_dense_tensor(
    dtype: torch.dtype, interleaved: bool
) -> None:
    cos, sin = _angles(5, for_each_sequence=True)
    x = drawn(B, 3, T, 12, dtype=dtype).requires_grad_()
    dout = drawn(B, 3, T, 12, dtype=dtype, seed=1).transpose(1, 2)
    out = apply_rotary(x.transpose(1, 2), cos, sin, interleaved=interleaved, backend="triton")
    (dx,) = torch.autograd.grad(out, x, dout)
    exact_x = doubled(x)
    exact = apply_rotary_reference(exact_x.transpose(1, 2), cos, sin, interleaved=interleaved)
    (exact_dx,) = torch.autograd.grad(exact, exact_x, dout.double())
    assert out.is_contiguous()
    assert_near(out, exact)
    assert_near(dx, exact_dx)


def test_rotation_follows_its_definition_element_by_element() -> None:
    angle = torch.tensor([[0.5, -1.25]])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 1, 5)
    c, s = angle.cos(), angle.sin()
    halves = apply_rotary_reference(x, c, s).flatten()
    neighbours = apply_rotary_reference(x, c, s, interleaved=True).flatten()
    for (one, two), pair in zip(((0, 2), (1, 3)), (0, 1), strict=True):
        turn = torch.polar(torch.ones(()), angle[0, pair])
        turned = torch.complex(x.flatten()[one], x.flatten()[two]) * turn
        torch.testing.assert_close(halves[[one, two]], torch.view_as_real(turned))
    for (one, two), pair in zip(((0, 1), (2, 3)), (0, 1), strict=True):
        turn = torch.polar(torch.ones(()), angle[0, pair])
        turned = torch.complex(x.flatten()[one], x.flatten()[two]) * turn
        torch.testing.assert_close(neighbours[[one, two]], torch.view_as_real(turned))
    assert halves[4] == neighbours[4] == 5.0


def test_split_results_lie_in_the_memory_of_the_projection() -> None:
    room = _qkv(SIZES[0], torch.float32) * 1
    q, k, v = split_qkv_apply_rotary(room, 4, 2, 16, *_angles(8), backend="triton")
    assert q.data_ptr() == room.data_ptr()
    assert {each.untyped_storage().data_ptr() for each in (q, k, v)} == {
        room.untyped_storage().data_ptr()
    }


def test_a_leaf_that_asks_for_its_gradient_keeps_its_value() -> None:
    leaf = _qkv(SIZES[0], torch.float32)
    before = leaf.detach().clone()
    split_qkv_apply_rotary(leaf, 4, 2, 16, *_angles(8), backend="triton")
    assert torch.equal(leaf, before)


def test_autograd_refuses_to_use_a_value_that_was_rotated_away() -> None:
    qkv = _qkv(SIZES[0], torch.float32)
    kept = qkv.exp()  # which keeps its result for the way back
    q, _, _ = split_qkv_apply_rotary(kept, 4, 2, 16, *_angles(8), backend="triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(q.sum(), qkv)


def test_split_results_cannot_be_written_to_where_gradients_are_needed() -> None:
    q, _, _ = split_qkv_apply_rotary(
        _qkv(SIZES[0], torch.float32) * 1, 4, 2, 16, *_angles(8), backend="triton"
    )
    with pytest.raises(RuntimeError, match="modified inplace"):
        q.mul_(2)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_results_that_are_not_used_have_no_gradient(backend: str) -> None:
    qkv = _qkv(SIZES[0], torch.float32)
    _, _, v = split_qkv_apply_rotary(
        qkv * 1, 4, 2, 16, *_angles(8), backend="torch" if backend == "torch" else "triton"
    )
    (dqkv,) = torch.autograd.grad(v.sum(), qkv)
    assert not dqkv[..., : 6 * 16].any()
    assert bool((dqkv[..., 6 * 16 :] == 1).all())


def test_a_tile_holds_heads_that_divide_those_of_queries_and_of_keys() -> None:
    assert select_rotary_tile(32, 8, 128, 4096) == (4, 8)
    assert select_rotary_tile(36, 4, 128, 4096) == (8, 4)
    assert select_rotary_tile(28, 0, 128, 4096) == (8, 4)
    assert select_rotary_tile(71, 1, 64, 4096) == (64, 1)
    assert select_rotary_tile(64, 64, 128, 4096) == (1, 32)


def test_angles_of_another_length_are_refused() -> None:
    cos, sin = drawn(T + 1, 8), drawn(T, 8)
    with pytest.raises(InputError) as caught:
        apply_rotary(drawn(B, T, 4, 16), cos, sin)
    assert [problem.where for problem in caught.value.problems] == ["sin", "cos"]


def test_more_pairs_than_a_head_has_are_refused() -> None:
    with pytest.raises(InputError, match="12 pairs do not fit into heads of 16"):
        apply_rotary(drawn(B, T, 4, 16), drawn(T, 12), drawn(T, 12))


def test_a_projection_of_another_width_is_refused() -> None:
    with pytest.raises(InputError, match=r"give it shape \(batch, positions, 128\)"):
        split_qkv_apply_rotary(drawn(B, T, 96), 4, 2, 16, *_angles(8))
