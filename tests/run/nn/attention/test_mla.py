"""Latent attention equals attention over heads that are written out from the latents."""

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import torch
from torch import Tensor

from meshwright.run.kernels.attention.sdpa import attention_reference
from meshwright.run.kernels.rotary.rotary import apply_rotary_reference
from meshwright.run.nn.attention.mla import MLASelfAttention, compute_mla_softmax_scale
from meshwright.run.nn.positions import PositionInfo, PositionTables
from meshwright.spec.model import NormSpec, Rotary, token_mixers

B, T, D, H = 2, 9, 20, 4
NOPE, ROPE, VALUE, KV, Q = 6, 4, 5, 7, 8
YARN = Rotary(scaling="yarn", factor=40.0, original_positions=16, mscale=1.0, mscale_all_dim=1.0)


def spec(**changes: Any) -> token_mixers.LatentAttentionSpec:
    values = {"heads": H, "kv_rank": KV, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE}
    return token_mixers.LatentAttentionSpec(
        **{**values, "q_rank": Q, "rotary": Rotary(), **changes}
    )


def made(described: token_mixers.LatentAttentionSpec) -> MLASelfAttention:
    module = MLASelfAttention(described, D, NormSpec(), dtype=torch.float64)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


def inputs() -> tuple[Tensor, PositionInfo]:
    torch.manual_seed(4)
    x = torch.randn(B, T, D, dtype=torch.float64)
    return x, PositionInfo(PositionTables(64), torch.zeros(B, T, dtype=torch.long))


def by_hand(module: MLASelfAttention, x: Tensor, places: PositionInfo) -> Tensor:
    """Write every head out, its part with position and its part without apart."""
    described = module.spec
    down = module.down(x)
    if described.q_rank is None:
        q, rest = module.q(x), down
    else:
        q_latent, rest = down[..., :Q], down[..., Q:]
        q = module.q_up(module.q_norm(q_latent))
    kv = module.kv_up(module.kv_norm(rest[..., :KV])).view(B, T, -1, NOPE + VALUE)
    q = q.view(B, T, -1, ROPE + NOPE)
    assert described.rotary is not None
    turns = places.get_rotary(described.rotary, ROPE)
    options = {"interleaved": described.rotary.interleaved}
    q_rope = apply_rotary_reference(q[..., :ROPE], turns.cos, turns.sin, **options)
    k_rope = apply_rotary_reference(rest[..., KV:].unsqueeze(2), turns.cos, turns.sin, **options)
    scores = torch.einsum("bthe,bshe->bhts", q[..., ROPE:], kv[..., :NOPE])
    scores += torch.einsum("bthe,bse->bhts", q_rope, k_rope.squeeze(2))
    future = torch.ones(T, T).triu(1).bool()
    shares = (scores * module.softmax_scale).masked_fill(future, -math.inf).softmax(-1)
    out: Tensor = module.o(torch.einsum("bhts,bshe->bthe", shares, kv[..., NOPE:]).flatten(2))
    return out


@pytest.mark.parametrize(
    "changes", [{}, {"q_rank": None}, {"bias": True}, {"rotary": Rotary(interleaved=True)},
                {"rotary": YARN}],
)  # fmt: skip
def test_it_equals_heads_written_out_from_the_latents(changes: dict[str, Any]) -> None:
    module = made(spec(**changes))
    x, places = inputs()
    torch.testing.assert_close(module(x, places), by_hand(module, x, places))


def test_latents_of_queries_and_keys_come_from_one_product() -> None:
    assert made(spec()).down.weight.shape == (Q + KV + ROPE, D)
    assert made(spec(q_rank=None)).down.weight.shape == (KV + ROPE, D)


def test_a_stretched_context_sharpens_the_scores() -> None:
    plain = (NOPE + ROPE) ** -0.5
    assert compute_mla_softmax_scale(spec()) == plain
    # DeepSeek-V3: 0.1 · ln(40) + 1, squared.
    assert compute_mla_softmax_scale(spec(rotary=YARN)) == pytest.approx(
        plain * (0.1 * math.log(40) + 1) ** 2
    )


def test_slices_of_heads_add_up_to_the_whole() -> None:
    whole = made(spec())
    x, places = inputs()
    total = torch.zeros(B, T, D, dtype=torch.float64)
    for index in range(2):
        part = made(spec())
        for name, axis in (("q_up", 0), ("kv_up", 0), ("o", 1)):
            weight = whole.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            piece = torch.nn.Parameter(weight.chunk(2, axis)[index])
            part.get_submodule(name).weight = piece
        total += part(x, places)
    torch.testing.assert_close(total, whole(x, places))


def test_values_narrower_than_keys_keep_their_width() -> None:
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    assert attention_reference(q, k, torch.randn(1, 3, 2, 5)).shape == (1, 3, 2, 5)
