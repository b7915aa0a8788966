"""Weight gradients that wait are the same, to the bit, as those of one backward pass."""

# Autograd's own functions are untyped.
# mypy: allow-untyped-calls

import pytest

pytest.importorskip("torch", reason="gradients are torch's")

import torch
from torch import Tensor, nn

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.gemm.glu_linear import glu_linear
from meshwright.run.kernels.moe.down_proj_combine import grouped_down_proj_combine
from meshwright.run.kernels.moe.grouped_gemm import grouped_gemm
from meshwright.run.kernels.moe.token_permutation import sort_by_expert
from meshwright.run.kernels.triton_compat import HAS_TRITON
from meshwright.run.kernels.weight_grad_store import delay_wgrad_compute
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.linear.fp8_linear import RECIPES, Fp8TrainingLinearMethod
from meshwright.run.nn.linear.linear import linear
from meshwright.run.nn.recompute import apply_recompute
from meshwright.run.nn.weight_init import materialize
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_decoder_model
from meshwright.spec.model.feedforward import MoESpec

DENSE = build_decoder_model("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
EXPERTS = MoESpec(count=4, top_k=2, width=16, shared_width=16, bias=True)
ROUTED = build_decoder_model(
    "routed", layers=2, hidden=32, heads=4, ffn=16, vocab=61, experts=EXPERTS
)
TOKENS = torch.arange(32).view(2, 16)


def _gradients(model: Model, layout: Layout, *, splits: bool) -> tuple[dict[str, Tensor], int]:
    made = build_decoder(model, dtype=torch.float32, options=BuildOptions(moe_aux_loss_coeff=0.01))
    materialize(made, "cpu", seed=3)
    apply_recompute(made.layers, layout)
    waited = 0
    for rows in (TOKENS % 61, TOKENS * 7 % 61):
        documents = PackedSequences.from_lengths([(7, 9), (16,)])
        loss = made.loss(rows, rows.roll(-1, 1), documents=documents).total
        if not splits:
            loss.backward()
            continue
        with delay_wgrad_compute() as late:
            loss.backward()
        waited += len(late)
        late.compute_all()
    return {name: each.grad for name, each in made.named_parameters() if each.grad is not None}, (
        waited
    )


@pytest.mark.parametrize("model", [DENSE, ROUTED], ids=lambda each: each.name)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(recompute="full"),
        Layout(recompute="selective", recompute_ops=("mlp_act", "layernorm", "moe_act")),
    ],
    ids=["kept", "full recompute", "selective recompute"],
)
def test_a_split_backward_leaves_the_gradients_of_a_whole_one(model: Model, layout: Layout) -> None:
    whole, _ = _gradients(model, layout, splits=False)
    split, waited = _gradients(model, layout, splits=True)
    # Of each layer at least the products of attention and of the feed-forward part wait.
    assert waited >= 2 * 2 * 4
    assert whole.keys() == split.keys()
    assert [name for name in whole if not torch.equal(whole[name], split[name])] == []


def test_a_weight_has_no_gradient_before_its_part_of_the_pass() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    weight = nn.Parameter(torch.randn(5, 4))
    with delay_wgrad_compute() as late:
        linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    late.compute_all()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(5, 4))
    assert len(late) == 0


def test_gradients_come_in_the_format_a_weight_was_told_and_past_its_hooks() -> None:
    weight = nn.Parameter(torch.randn(5, 4).bfloat16())
    weight.grad_dtype = torch.float32
    told: list[torch.dtype | None] = []
    weight.register_post_accumulate_grad_hook(
        lambda each: told.append(None if each.grad is None else each.grad.dtype)
    )
    with delay_wgrad_compute() as late:
        linear(torch.randn(3, 4).bfloat16(), weight).sum().backward()
    # Autograd calls them though nothing came.
    assert told == [None]
    late.compute_all()
    assert told == [None, torch.float32]


def test_a_weight_made_of_others_gets_its_gradient_at_once() -> None:
    base = nn.Parameter(torch.randn(5, 4))
    with delay_wgrad_compute() as late:
        linear(torch.ones(3, 4), base * 2).sum().backward()
    assert len(late) == 0
    torch.testing.assert_close(base.grad, torch.full((5, 4), 6.0))


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    ends = torch.tensor([2, 2, 6, 8], dtype=torch.int32)
    return grouped_gemm(x, weight, ends, backend="triton")


def _expert_output(x: Tensor, weight: Tensor) -> Tensor:
    order = sort_by_expert(torch.tensor([[0, 1], [1, 3], [3, 0], [0, 2]]), 4)
    return grouped_down_proj_combine(x, weight, order, torch.full((4, 2), 0.5), backend="triton")


def _fp8(x: Tensor, weight: Tensor) -> Tensor:
    return Fp8TrainingLinearMethod(RECIPES["fp8-rowwise"])(x, weight, None)


@pytest.mark.skipif(not HAS_TRITON, reason="kernels need Triton")
@pytest.mark.parametrize(
    ("product", "x_shape", "weight_shape"),
    [
        (_grouped, (8, 16), (4, 24, 16)),
        (_expert_output, (8, 16), (4, 24, 16)),
        (lambda x, weight: glu_linear(x, weight, "silu", backend="triton"), (8, 32), (24, 16)),
        (_fp8, (16, 32), (48, 32)),
    ],
    ids=["grouped products", "experts' output", "gated unit", "fp8"],
)
def test_every_product_can_wait(product, x_shape, weight_shape) -> None:  # type: ignore[no-untyped-def]
    made = torch.Generator().manual_seed(5)
    x = torch.randn(x_shape, generator=made, requires_grad=True)
    weight = nn.Parameter(torch.randn(weight_shape, generator=made))
    product(x, weight).square().sum().backward()
    whole, weight.grad = weight.grad, None
    with delay_wgrad_compute() as late:
        product(x, weight).square().sum().backward()
    assert weight.grad is None
    assert len(late) == 1
    late.compute_all()
    assert torch.equal(weight.grad, whole)  # type: ignore[arg-type]
