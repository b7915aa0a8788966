"""The attention module: its fused products, its options, and slices of its heads."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import torch
from torch import Tensor, nn

from meshwright.run.kernels.attention.sdpa import attention_reference
from meshwright.run.kernels.rotary.rotary import apply_rotary_reference
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.positions import PositionInfo, PositionTables, compute_query_scale
from meshwright.spec.model import AttentionTemperature, NormSpec, Rotary, token_mixers

B, T, D, H, K, E = 2, 9, 20, 4, 2, 8


def made(norm: NormSpec | None = None, **changes: Any) -> SelfAttention:
    values = {"heads": H, "kv_heads": K, "head_dim": E, "rotary": Rotary(), **changes}
    module = SelfAttention(
        token_mixers.AttentionSpec(**values), D, norm or NormSpec(), dtype=torch.float64
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


def inputs() -> tuple[Tensor, PositionInfo]:
    torch.manual_seed(4)
    x = torch.randn(B, T, D, dtype=torch.float64)
    return x, PositionInfo(PositionTables(64), torch.zeros(B, T, dtype=torch.long))


def parts(module: SelfAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.split(module.qkv(x)[..., : (H + 2 * K) * E], [H * E, K * E, K * E], -1)
    q, k, v = (row.reshape(B, T, -1, E) for row in rows)
    return q, k, v


def turned(x: Tensor, places: PositionInfo, rotary: Rotary) -> Tensor:
    turns = places.get_rotary(rotary, E)
    return apply_rotary_reference(x, turns.cos, turns.sin, interleaved=rotary.interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_queries_and_keys_turn_and_values_do_not(interleaved: bool, fraction: float) -> None:
    rotary = Rotary(interleaved=interleaved, fraction=fraction)
    module = made(rotary=rotary, qkv_bias=True, out_bias=True)
    x, places = inputs()
    q, k, v = parts(module, x)
    mixed = attention_reference(turned(q, places, rotary), turned(k, places, rotary), v)
    torch.testing.assert_close(module(x, places), module.o(mixed.flatten(2)))


def test_norms_of_heads_come_before_the_turn() -> None:
    module = made(qk_norm="head")
    x, places = inputs()
    q, k, v = parts(module, x)
    q, k = (turned(y, places, Rotary()) for y in (module.q_norm(q), module.k_norm(k)))
    torch.testing.assert_close(module(x, places), module.o(attention_reference(q, k, v).flatten(2)))


def test_a_full_norm_is_over_all_heads_at_once() -> None:
    module = made(qk_norm="full", rotary=None)
    assert module.q_norm.weight is not None
    assert module.q_norm.weight.shape == (H * E,)
    x, places = inputs()
    q, k, v = parts(module, x)
    q, k = module.q_norm(q.flatten(2)).view_as(q), module.k_norm(k.flatten(2)).view_as(k)
    torch.testing.assert_close(module(x, places), module.o(attention_reference(q, k, v).flatten(2)))


def test_an_l2_norm_has_no_weights_and_brings_heads_to_one_length() -> None:
    module = made(qk_norm="l2", rotary=None)
    x, places = inputs()
    q, k, v = parts(module, x)
    q, k = (y / y.square().mean(-1, keepdim=True).add(1e-5).sqrt() for y in (q, k))
    torch.testing.assert_close(module(x, places), module.o(attention_reference(q, k, v).flatten(2)))


def test_a_gate_lies_behind_the_values_and_closes_the_output() -> None:
    module = made(gate=True)
    assert module.qkv.weight.shape == ((2 * H + 2 * K) * E, D)
    with torch.no_grad():
        module.qkv.weight[-H * E :] = 0
    open_half = made(gate=True)
    x, places = inputs()
    q, k, v = parts(module, x)
    mixed = attention_reference(turned(q, places, Rotary()), turned(k, places, Rotary()), v)
    torch.testing.assert_close(module(x, places), module.o(mixed.flatten(2)) / 2)
    gate = open_half.qkv(x)[..., -H * E :].sigmoid()
    torch.testing.assert_close(open_half(x, places), open_half.o(mixed.flatten(2) * gate))


def test_clipping_bounds_what_the_product_gives() -> None:
    module = made(clip=0.25, rotary=None)
    x, places = inputs()
    q, k, v = (y.clamp(-0.25, 0.25) for y in parts(module, x))
    torch.testing.assert_close(module(x, places), module.o(attention_reference(q, k, v).flatten(2)))


def test_queries_grow_with_their_position() -> None:
    temperature = AttentionTemperature(floor=2, scale=0.7)
    module = made(temperature=temperature, rotary=None)
    x, places = inputs()
    q, k, v = parts(module, x)
    q = q * compute_query_scale(temperature, torch.arange(T)).view(1, T, 1, 1)
    torch.testing.assert_close(
        module(x, places), module.o(attention_reference(q, k, v).flatten(2)), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("alibi", [False, True])
def test_slices_of_heads_add_up_to_the_whole(alibi: bool) -> None:
    whole = made(sinks=True, rotary=None if alibi else Rotary())
    whole.alibi = alibi
    x, places = inputs()
    total = torch.zeros(B, T, D, dtype=torch.float64)
    rows = torch.split(whole.qkv.weight, [H * E, K * E, K * E])
    assert whole.sinks is not None
    for index in range(K):
        part = made(sinks=True, rotary=whole.spec.rotary)
        part.alibi, part.first_head = alibi, index * H // K
        part.heads, part.kv_heads = H // K, 1
        mine = [row.chunk(K)[index] for row in rows]
        part.qkv.weight = nn.Parameter(torch.cat(mine))
        part.o.weight = nn.Parameter(whole.o.weight.chunk(K, 1)[index])
        part.sinks = nn.Parameter(whole.sinks.chunk(K)[index])
        total += part(x, places)
    torch.testing.assert_close(total, whole(x, places))
