"""Recompute in fp8 keeps no copy of what it makes anew, and changes no bit of a gradient."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.run.kernels.activation.glu import glu_reference
from meshwright.run.nn import mlp
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.linear import fp8_glu_linear
from meshwright.run.nn.linear.fp8_conversion import apply_precision, cache_fp8_weights
from meshwright.run.nn.linear.fp8_linear import RECIPES
from meshwright.run.nn.recompute import apply_recompute
from meshwright.run.nn.weight_init import materialize
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import RecomputeOp
from meshwright.spec.model import build_decoder_model

MODEL = build_decoder_model("dense", layers=2, hidden=128, heads=2, kv_heads=1, ffn=256, vocab=64)
TOKENS = torch.arange(128).view(1, 128) % 64
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def made(precision: str, *ops: RecomputeOp) -> Decoder:
    built = build_decoder(MODEL, dtype=torch.bfloat16)
    materialize(built, "cpu")
    apply_recompute(
        built.layers, Layout(recompute="selective" if ops else "none", recompute_ops=ops)
    )
    apply_precision(built, precision, smallest=0)
    cache_fp8_weights(built, False)
    return built


def step(built: Decoder) -> tuple[dict[str, Tensor], int]:
    """Return every gradient, and how many fp8 numbers a token of a layer had kept for backward."""
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        loss = built.loss(TOKENS, TOKENS).total
    kept = sum(each.numel() for each in saved_of(loss.grad_fn) if each.dtype in FP8)
    torch.autograd.backward(loss)
    grads = {name: weight.grad for name, weight in built.named_parameters()}
    found = {name: grad for name, grad in grads.items() if grad is not None}
    return found, kept // (TOKENS.numel() * MODEL.layers)


def saved_of(last: Any) -> Iterator[Tensor]:
    """Go through what the operations that led to a result hold themselves, notes left out."""
    waiting, seen = [last], {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            # Packed by hooks, all of them: a tensor, or what stands for one.
            packed = [each.data for each in getattr(node, "_raw_saved_tensors", ())]
            yield from (each for each in packed if isinstance(each, Tensor))


@lru_cache
def plain_step(precision: str) -> dict[str, Tensor]:
    """Return every gradient without recompute."""
    return step(made(precision))[0]


# Of the inputs of qkv, o, gate_up and down, of 128, 128, 128 and 256 numbers, that of o is kept by
# the attention itself.
KEPT: dict[tuple[RecomputeOp, ...], int] = {
    (): 128 + 128 + 256,
    ("layernorm",): 256,
    ("mlp_act",): 128 + 128,
    ("layernorm", "mlp_act"): 0,
    ("layernorm", "mlp"): 0,
    ("core_attn", "mlp"): 128,
}


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("ops", KEPT, ids="+".join)
def test_what_is_made_anew_is_not_kept_and_gradients_stay(
    precision: str, ops: tuple[RecomputeOp, ...]
) -> None:
    expected = plain_step(precision)
    found, kept = step(made(precision, *ops))
    assert kept == KEPT[ops]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _ungate(
    gate_up: Tensor, dgated: Tensor, activation: Any, limit: float, *, again: bool
) -> tuple[Tensor, Tensor | None]:
    with torch.enable_grad():
        argument = gate_up.detach().requires_grad_()
        gated = glu_reference(argument, activation)
    (dgate_up,) = torch.autograd.grad(gated, argument, dgated)
    return dgate_up, gated.detach() if again else None


@pytest.mark.parametrize("precision", RECIPES)
def test_an_activation_made_on_backwards_way_is_the_one_of_forward(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on a GPU, with the unit's kernels replaced by torch."""
    expected = plain_step(precision)
    monkeypatch.setattr(mlp, "should_use_triton", lambda *_: True)
    monkeypatch.setattr(
        fp8_glu_linear, "glu_forward", lambda raw, activation, _: glu_reference(raw, activation)
    )
    monkeypatch.setattr(fp8_glu_linear, "glu_backward", _ungate)
    found, kept = step(made(precision, "mlp_act"))
    assert kept == KEPT["mlp_act",]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
