"""Recompute frees what it names and changes no bit of a gradient."""

from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import msgspec
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    RecomputedFunction,
    apply_recompute,
    drop_saved_tensors,
    list_recompute_ops,
)
from meshwright.run.nn.weight_init import materialize
from meshwright.spec.layout import Layout
from meshwright.spec.model import (
    BlockSpec,
    LatentAttentionSpec,
    Model,
    MoESpec,
    Rotary,
    build_decoder_model,
)

TOKENS = torch.arange(2 * 32).view(2, 32) % 53


def dense(**changes: Any) -> Model:
    model = build_decoder_model("dense", layers=3, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=53)
    block = msgspec.structs.replace(model.blocks[0], **changes)
    return msgspec.structs.replace(model, blocks=(block,))


LATENT = dense(
    mixer=LatentAttentionSpec(
        heads=8, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=8, q_rank=8, rotary=Rotary()
    )
)
SPARSE = msgspec.structs.replace(
    dense(),
    blocks=(
        BlockSpec(
            name="dense",
            mixer=dense().blocks[0].mixer,
            mlp=MoESpec(count=8, top_k=2, width=64, shared_width=64),
        ),
    ),
)


def made(model: Model, layout: Layout) -> Decoder:
    built = build_decoder(model, dtype=torch.float32)
    materialize(built, "cpu")
    apply_recompute(built.layers, layout)
    return built


def held_bytes(built: Decoder) -> tuple[Tensor, int]:
    """Return a loss, and the bytes of memory that are taken more than before it."""
    built.loss(TOKENS, TOKENS)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = built.loss(TOKENS, TOKENS).total
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    return loss, sum(event.nbytes() for event in events if event.name() == "[memory]")


def step(model: Model, layout: Layout) -> tuple[dict[str, Tensor], int]:
    """Return every gradient, and the bytes held between forward and backward."""
    built = made(model, layout)
    loss, held = held_bytes(built)
    torch.autograd.backward(loss)
    grads = {name: weight.grad for name, weight in built.named_parameters()}
    return {name: grad for name, grad in grads.items() if grad is not None}, held


@lru_cache
def plain_step(model: Model) -> tuple[dict[str, Tensor], int]:
    """Do the same without recompute."""
    return step(model, Layout())


def selective(*ops: Any) -> Layout:
    return Layout(recompute="selective", recompute_ops=ops)


T = TOKENS.numel() * 4 * 3
"""Bytes of one fp32 number per token in each of the three layers."""

CASES: dict[str, tuple[Model, Layout, int]] = {
    # The model, the layout, and the least bytes it has to save.
    "layernorm": (dense(), selective("layernorm"), 2 * 32 * T),
    "mlp_act": (dense(), selective("mlp_act"), 64 * T),
    "core_attn": (dense(), selective("core_attn"), 32 * T),
    "mlp": (dense(), selective("mlp"), (32 + 128 + 64) * T),
    "cheap ones": (dense(), selective("layernorm", "mlp_act", "core_attn"), (96 + 64) * T),
    "mlp beside layernorm": (dense(), selective("mlp", "layernorm", "mlp_act"), (64 + 192) * T),
    "full": (dense(), Layout(recompute="full"), (5 * 32 + 192) * T),
    "one layer": (dense(), Layout(recompute="full", recompute_layers=1), (160 + 192) * T // 3),
    "sandwich": (dense(norms="sandwich"), selective("layernorm", "mlp"), 64 * T),
    "sandwich, full": (dense(norms="sandwich"), Layout(recompute="full"), (5 * 32 + 192) * T),
    "parallel": (dense(norms="parallel"), selective("layernorm", "core_attn"), 96 * T),
    "post": (dense(norms="post"), selective("mlp_act"), 64 * T),
    "mla_up_proj": (LATENT, selective("mla_up_proj"), 8 * (8 + 8 + 12) * T),
    "mla, both": (LATENT, selective("mla_up_proj", "core_attn", "layernorm"), 8 * 36 * T),
    "mla, full": (LATENT, Layout(recompute="full"), 8 * 36 * T),
    "moe": (SPARSE, selective("moe"), (2 * 192 + 192) * T),
    "moe_act": (SPARSE, selective("moe_act"), 2 * 64 * T),
    "shared_experts": (SPARSE, selective("shared_experts"), 192 * T),
    "all of moe": (SPARSE, selective("moe", "moe_act", "shared_experts", "layernorm"), 640 * T),
    "moe, full": (SPARSE, Layout(recompute="full"), 640 * T),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_stay_bit_for_bit_and_memory_shrinks(name: str) -> None:
    model, layout, least = CASES[name]
    expected, all_bytes = plain_step(model)
    found, fewer_bytes = step(model, layout)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert all_bytes - fewer_bytes >= least


def test_backward_can_run_twice() -> None:
    built = made(dense(), selective("layernorm", "mlp", "core_attn"))
    loss = built.loss(TOKENS, TOKENS).total
    weights = list(built.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, weights)))


def test_evaluation_recomputes_nothing() -> None:
    built = made(dense(), Layout(recompute="full"))
    plain = made(dense(), Layout())
    with torch.no_grad():
        assert torch.equal(built(TOKENS), plain(TOKENS))


def test_only_the_first_layers_recompute_when_few_are_named() -> None:
    layout = Layout(recompute="selective", recompute_ops=("mlp",), recompute_layers=2)
    assert list_recompute_ops(layout, 3) == (frozenset({"mlp"}), frozenset({"mlp"}), NO_RECOMPUTE)
    assert list_recompute_ops(Layout(recompute="full"), 2) == (frozenset({FULL_RECOMPUTE}),) * 2


class _Counted(nn.Module):
    """A product that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 2)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(x @ self.weight)


def test_a_replay_runs_once_more_for_its_own_backward_and_its_dropped_result() -> None:
    inner, outer = _Counted(), _Counted()
    x = torch.randn(3, 4, requires_grad=True)
    replay = RecomputedFunction(inner)
    y = replay(x)
    with drop_saved_tensors((y, replay.recompute_output)):
        z = outer(y)
    del y
    torch.autograd.backward(z.sum())
    assert (inner.runs, outer.runs) == (2, 1)


def test_a_dropped_tensor_is_made_again_once_for_all_who_saved_it() -> None:
    made_again = []
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.sin(x)

    def again() -> Tensor:
        made_again.append(1)
        return torch.sin(x)

    with drop_saved_tensors((y, again)):
        z = (y * y.flip(0)).sum() + (y.t() @ y).sum()
    (found,) = torch.autograd.grad(z, x)
    y = torch.sin(x)
    (expected,) = torch.autograd.grad((y * y.flip(0)).sum() + (y.t() @ y).sum(), x)
    assert torch.equal(found, expected)
    assert len(made_again) == 1
