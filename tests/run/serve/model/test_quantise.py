"""Weights of fewer bits stay near, take the memory they should, and are refused where they lie."""

from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.initialise import materialise
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.quantise import quantise
from meshwright.run.serve.model.step import Row, step_of
from meshwright.spec.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Mamba2,
    Mlp,
    Model,
    Rotary,
)

TOKENS = list(range(3, 20))


def wide(**given: Any) -> Decoder:
    """Return a decoder whose sides fp8 and groups of four bits can divide."""
    mixer = Attention(heads=8, kv_heads=2, head_dim=16, rotary=Rotary(), qkv_bias=True)
    block = Block(name="a", mixer=given.get("mixer", mixer), mlp=given.get("mlp", Mlp(width=192)))
    model = Model(name="wide", hidden=128, vocab=61, blocks=(block,), pattern="2*a")
    decoder = build(model, dtype=torch.float32)
    # Weights as models begin with: larger ones would let rounding grow from layer to layer.
    materialise(decoder, "cpu", seed=1)
    return decoder.eval()


def logits(decoder: Decoder) -> torch.Tensor:
    forward = Forward(decoder, PagedCache(decoder, 8, 4))
    return forward.run(step_of([Row(TOKENS, 0, range(5))], 4, all_wanted=True))


@pytest.mark.parametrize(("kind", "near", "share"), [("fp8", 0.06, 0.27), ("int4", 0.16, 0.16)])
def test_logits_stay_near(kind: Any, near: float, share: float) -> None:
    wanted = logits(wide())
    decoder = wide()
    report = quantise(decoder, kind)
    error = (logits(decoder) - wanted).norm() / wanted.norm()
    assert 0 < error < near
    assert len(report.layers) == 8
    assert not report.left
    assert report.bytes < share * report.bytes_before
    again = quantise(decoder, kind)
    assert not again.layers
    assert "already" in again.left["0.mixer.qkv"]


def test_latent_products_are_left_to_be_absorbed() -> None:
    mixer = LatentAttention(
        heads=4, kv_rank=32, nope_dim=16, rope_dim=16, value_dim=16, rotary=Rotary()
    )
    wanted = logits(wide(mixer=mixer))
    decoder = wide(mixer=mixer)
    report = quantise(decoder, "fp8")
    assert report.left == {f"{layer}.mixer.kv_up": "it is absorbed into queries" for layer in "01"}
    assert (logits(decoder) - wanted).norm() < 0.15 * wanted.norm()


def test_recurrent_layers_are_quantised_too() -> None:
    mixer = Mamba2(heads=4, head_dim=16, state_dim=14, groups=2)
    wanted = logits(wide(mixer=mixer))
    decoder = wide(mixer=mixer)
    report = quantise(decoder, "int4")
    assert {"0.mixer.input", "0.mixer.out"} <= set(report.layers)
    assert (logits(decoder) - wanted).norm() < 0.3 * wanted.norm()


def test_layers_that_do_not_divide_are_left() -> None:
    report = quantise(wide(mlp=Mlp(width=200)), "fp8")
    assert "0.mlp.down" in report.left
    assert "0.mixer.o" in report.layers


def test_experts_and_strange_formats_are_refused() -> None:
    experts = Experts(count=2, top_k=1, width=16)
    with pytest.raises(InputError, match="serve it in bf16"):
        quantise(wide(mlp=experts), "int4")
    with pytest.raises(InputError, match="fp8"):
        quantise(wide(), "fp9")  # type: ignore[arg-type]
