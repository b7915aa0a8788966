"""Every shape of the catalog, made small, trains: packed, recomputed, and without looking ahead."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import torch
from msgspec.structs import replace
from torch import Tensor

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.recompute import apply_recompute
from meshwright.run.nn.weight_init import materialize
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import (
    AttentionSpec,
    FeedForward,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
    MLPSpec,
    Model,
    MoESpec,
)

pytestmark = pytest.mark.slow

VOCAB, LENGTH, FIRST = 64, 20, 7


def small_mixer(mixer: Mixer | None) -> Mixer | None:
    match mixer:
        case AttentionSpec():
            kv_heads = 4 if mixer.heads == mixer.kv_heads else 2
            near: dict[str, Any] = {"window": mixer.window and 6, "chunk": mixer.chunk and 8}
            return replace(mixer, heads=4, kv_heads=kv_heads, head_dim=16, **near)
        case LatentAttentionSpec():
            sizes = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 12}
            return replace(mixer, heads=4, q_rank=mixer.q_rank and 16, **sizes)
        case GatedDeltaNetSpec():
            return replace(mixer, key_heads=2, value_heads=4, key_dim=8, value_dim=8)
        case Mamba2Spec():
            return replace(mixer, heads=4, head_dim=8, state_dim=8, groups=2)
    return None


def small_mlp(mlp: FeedForward | None) -> FeedForward | None:
    match mlp:
        case MLPSpec():
            return replace(mlp, width=48)
        case MoESpec():
            grouped = mlp.groups > 1
            sizes: dict[str, Any] = {"shared_width": mlp.shared_width and 24, "width": 16}
            sizes |= {"groups": 4 if grouped else 1, "groups_used": 2 if grouped else 1}
            sizes |= {"latent": mlp.latent and 16}
            return replace(mlp, count=8, top_k=min(mlp.top_k, 3), **sizes)
    return None


def small(model: Model) -> Model:
    """Keep one layer of each kind, and every switch."""
    blocks = tuple(
        replace(block, mixer=small_mixer(block.mixer), mlp=small_mlp(block.mlp))
        for block in model.blocks
    )
    pattern = " ".join(dict.fromkeys(model.layer_names))
    sizes: dict[str, Any] = {"hidden": 32, "vocab": VOCAB, "max_positions": 64, "vision": None}
    return replace(model, blocks=blocks, pattern=pattern, **sizes)


def shapes() -> dict[str, Model]:
    """Return the distinct small shapes, by the first model that has each."""
    found: dict[Model, str] = {}
    for name in catalog.list_models():
        shape = replace(small(catalog.get_model(name)), name="small", family="any")
        found.setdefault(shape, name)
    return {name: shape for shape, name in found.items()}


SHAPES = shapes()


def made(name: str, dtype: torch.dtype) -> Decoder:
    built = build_decoder(SHAPES[name], dtype=dtype, options=BuildOptions(moe_aux_loss_coeff=0.01))
    materialize(built, "cpu")
    return built


def tokens(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, VOCAB, (2, LENGTH))


def gradients(built: Decoder, layout: Layout) -> dict[str, Tensor]:
    apply_recompute(built.layers, layout)
    built.zero_grad()
    documents = PackedSequences.from_lengths([[FIRST, LENGTH - FIRST], [LENGTH]])
    torch.autograd.backward(built.loss(tokens(0), tokens(1), documents=documents).total)
    grads = {name: weight.grad for name, weight in built.named_parameters() if weight.requires_grad}
    assert None not in grads.values()
    return {name: grad for name, grad in grads.items() if grad is not None}


INSIDE: Any = ("core_attn", "layernorm", "mlp_act", "mla_up_proj", "moe_act", "shared_experts")
LAYOUTS = (
    Layout(recompute="full"),
    Layout(recompute="selective", recompute_ops=INSIDE),
    Layout(recompute="selective", recompute_ops=(*INSIDE, "mlp", "moe")),
)


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_learns_and_recompute_changes_no_bit(name: str) -> None:
    built = made(name, torch.float32)
    expected = gradients(built, Layout())
    assert all(grad.isfinite().all() and grad.any() for grad in expected.values())
    for layout in LAYOUTS:
        found = gradients(built, layout)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", SHAPES)
def test_documents_are_alone_and_the_future_unseen(name: str) -> None:
    built = made(name, torch.float64).eval()
    x = tokens(0)[:1]
    packed = built(x, documents=PackedSequences.from_lengths([[FIRST, LENGTH - FIRST]]))
    # Rotary angles are fp32, and experts are chosen by scores that may lie close together.
    torch.testing.assert_close(packed[:, :FIRST], built(x[:, :FIRST]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[:, FIRST:], built(x[:, FIRST:]), rtol=1e-5, atol=1e-5)
