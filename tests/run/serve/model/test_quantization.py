"""Weights of fewer bits stay near, take the memory they should, and are refused where they lie."""

from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.quantization import quantize_model
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    Model,
    MoESpec,
    Rotary,
)

TOKENS = list(range(3, 20))


def wide(**given: Any) -> Decoder:
    """Return a decoder whose sides fp8 and groups of four bits can divide."""
    mixer = AttentionSpec(heads=8, kv_heads=2, head_dim=16, rotary=Rotary(), qkv_bias=True)
    block = BlockSpec(
        name="a", mixer=given.get("mixer", mixer), mlp=given.get("mlp", MLPSpec(width=192))
    )
    model = Model(name="wide", hidden=128, vocab=61, blocks=(block,), pattern="2*a")
    decoder = build_decoder(model, dtype=torch.float32)
    # Weights as models begin with: larger ones would let rounding grow from layer to layer.
    materialize(decoder, "cpu", seed=1)
    return decoder.eval()


def logits(decoder: Decoder) -> torch.Tensor:
    forward = ServedModel(decoder, PagedKVCache(decoder, 8, 4))
    return forward.forward(build_forward_batch([BatchRow(TOKENS, 0, range(5))], 4, all_wanted=True))


@pytest.mark.parametrize(("kind", "near", "share"), [("fp8", 0.06, 0.27), ("int4", 0.16, 0.16)])
def test_logits_stay_near(kind: Any, near: float, share: float) -> None:
    wanted = logits(wide())
    decoder = wide()
    report = quantize_model(decoder, kind)
    error = (logits(decoder) - wanted).norm() / wanted.norm()
    assert 0 < error < near
    assert len(report.quantized_layers) == 8
    assert not report.skipped
    assert report.quantized_bytes < share * report.original_bytes
    again = quantize_model(decoder, kind)
    assert not again.quantized_layers
    assert "already" in again.skipped["0.mixer.qkv"]


def test_latent_products_are_left_to_be_absorbed() -> None:
    mixer = LatentAttentionSpec(
        heads=4, kv_rank=32, nope_dim=16, rope_dim=16, value_dim=16, rotary=Rotary()
    )
    wanted = logits(wide(mixer=mixer))
    decoder = wide(mixer=mixer)
    report = quantize_model(decoder, "fp8")
    assert report.skipped == {
        f"{layer}.mixer.kv_up": "it is absorbed into queries" for layer in "01"
    }
    assert (logits(decoder) - wanted).norm() < 0.15 * wanted.norm()


def test_recurrent_layers_are_quantised_too() -> None:
    mixer = Mamba2Spec(heads=4, head_dim=16, state_dim=14, groups=2)
    wanted = logits(wide(mixer=mixer))
    decoder = wide(mixer=mixer)
    report = quantize_model(decoder, "int4")
    assert {"0.mixer.input", "0.mixer.out"} <= set(report.quantized_layers)
    assert (logits(decoder) - wanted).norm() < 0.3 * wanted.norm()


def test_layers_that_do_not_divide_are_left() -> None:
    report = quantize_model(wide(mlp=MLPSpec(width=200)), "fp8")
    assert "0.mlp.down" in report.skipped
    assert "0.mixer.o" in report.quantized_layers


def test_experts_and_strange_formats_are_refused() -> None:
    experts = MoESpec(count=2, top_k=1, width=16)
    with pytest.raises(InputError, match="serve it in bf16"):
        quantize_model(wide(mlp=experts), "int4")
    with pytest.raises(InputError, match="fp8"):
        quantize_model(wide(), "fp9")  # type: ignore[arg-type]
