"""Layers in fp8: what they compute, what they keep, and which layers become one."""

import copy
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import torch
from torch import nn
from torch.nn.functional import scaled_mm as torch_scaled_mm

from meshwright.errors import InputError
from meshwright.run.kernels.fp8.quantization import (
    E4M3,
    E5M2,
    Fp8Matrix,
    dequantize,
    quantize_blockwise,
    quantize_rowwise,
    quantize_tensorwise,
)
from meshwright.run.kernels.fp8.scaled_mm import _KINDS, scaled_mm
from meshwright.run.nn.linear.fp8_conversion import (
    SKIPPED_MODULES,
    apply_precision,
    cache_fp8_weights,
)
from meshwright.run.nn.linear.fp8_linear import RECIPES, Fp8Recipe, Fp8TrainingLinearMethod
from meshwright.run.nn.linear.linear import Linear, linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXTREMES = {
    "tensorwise e4m3": Fp8Recipe(name="mine", scaling="tensorwise"),
    "rowwise, wgrad in bf16": replace(RECIPES["fp8-rowwise"], wgrad="bf16"),
    "rowwise, powers of two": replace(RECIPES["fp8-rowwise"], power_of_two=True),
    "blockwise, no weights kept": replace(RECIPES["fp8-blockwise"], keeps_weights=False),
}
every_recipe = pytest.mark.parametrize(
    "recipe", [*RECIPES.values(), *EXTREMES.values()], ids=[*RECIPES, *EXTREMES]
)
each_scaling = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def _made(*shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=random).to(DEVICE, torch.bfloat16).requires_grad_()


def _run(layer: Any, x: torch.Tensor, weight: torch.Tensor, **said: Any) -> list[torch.Tensor]:
    """Return y, dx and dw."""
    y = layer(x, weight, None, **said)
    dy = _made(*y.shape).detach() * 1e-3
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@every_recipe
@pytest.mark.parametrize("tokens", [(128,), (2, 96), (50,), (3, 7)], ids=str)
def test_values_and_gradients_are_near_those_of_bf16(
    recipe: Fp8Recipe, tokens: tuple[int, ...]
) -> None:
    x, weight = _made(*tokens, 256), _made(128, 256)
    found = _run(Fp8TrainingLinearMethod(recipe), x, weight)
    exact = _run(lambda *given: linear(*given[:2]), x, weight)
    for one, other in zip(found, exact, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        # Two operands with relative errors of up to 2^-4 (e4m3) or 2^-3 (e5m2), at random.
        assert _error(one, other) < (0.08 if recipe.gradient_dtype == E5M2 else 0.05)


@each_scaling
@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU sums in float32, tensor cores differ")
def test_products_are_exactly_those_of_the_rounded_operands(recipe: Fp8Recipe) -> None:
    x, weight = _made(128, 256), _made(128, 256)
    layer = Fp8TrainingLinearMethod(recipe)
    y, dx, dw = _run(layer, x, weight)
    dy = layer.quantize_gradient(_made(*y.shape).detach() * 1e-3, transpose=True)
    rounded, weights = (
        layer.quantize_activation(x, transpose=True),
        layer.quantize_weight(weight, transpose=True),
    )
    for found, (a, b) in {
        y: (rounded.direct, weights.direct),
        dx: (dy.direct, weights.transposed),
        dw: (dy.transposed, rounded.transposed),
    }.items():
        assert a is not None
        assert b is not None
        exact = dequantize(a).double() @ dequantize(b).double().t()
        torch.testing.assert_close(found, exact.bfloat16(), rtol=1e-2, atol=1e-6)
        assert _error(found, exact) < 3e-3  # bf16 output


@each_scaling
def test_gradients_have_the_recipes_format_and_the_rest_e4m3(recipe: Fp8Recipe) -> None:
    layer, x = Fp8TrainingLinearMethod(recipe), _made(16, 32).detach()
    assert layer.quantize_gradient(x, transpose=False).direct.data.dtype == recipe.gradient_dtype
    assert layer.quantize_activation(x, transpose=False).direct.data.dtype == E4M3
    assert layer.quantize_weight(_made(128, 128), transpose=False).direct.data.dtype == E4M3


def _kept(
    layer: Fp8TrainingLinearMethod, x: torch.Tensor, weight: torch.Tensor, **said: Any
) -> list[Any]:
    """Return shapes and formats of what autograd is given to keep, scales left out."""
    kept: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(each: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(each.shape), each.dtype))
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        layer(x, weight, None, **said)
    return [each for each in kept if each[1] != torch.float32]


@each_scaling
def test_backward_keeps_x_transposed_in_fp8_and_not_in_bf16(recipe: Fp8Recipe) -> None:
    kept = _kept(Fp8TrainingLinearMethod(recipe), _made(64, 256), _made(128, 256))
    tokens = 64 if recipe.alignment == 16 else 128
    assert kept == [((256, tokens), E4M3), ((256, 128), E4M3)]


def test_backward_keeps_x_itself_where_wgrad_is_in_bf16_or_x_is_at_hand() -> None:
    x, weight = _made(64, 256), _made(128, 256)
    wanted = [((64, 256), torch.bfloat16), ((256, 128), E4M3)]
    in_bf16 = Fp8TrainingLinearMethod(EXTREMES["rowwise, wgrad in bf16"])
    assert _kept(in_bf16, x, weight) == wanted
    plain = Fp8TrainingLinearMethod(RECIPES["fp8-rowwise"])
    assert _kept(plain, x, weight, input_is_free=True) == wanted


@each_scaling
def test_an_input_at_hand_changes_nothing(recipe: Fp8Recipe) -> None:
    x, weight = _made(48, 128), _made(128, 128)
    one = _run(Fp8TrainingLinearMethod(recipe), x, weight)
    other = _run(Fp8TrainingLinearMethod(recipe), x, weight, input_is_free=True)
    assert all(torch.equal(*each) for each in zip(one, other, strict=True))


@each_scaling
def test_weights_that_are_not_kept_change_nothing_and_leave_no_copy(recipe: Fp8Recipe) -> None:
    x, weight = _made(48, 128), _made(128, 128)
    keeping, forgetting = Fp8TrainingLinearMethod(recipe), Fp8TrainingLinearMethod(recipe)
    forgetting.set_weight_caching(False)
    one, other = _run(keeping, x, weight), _run(forgetting, x, weight)
    assert all(torch.equal(*each) for each in zip(one, other, strict=True))
    wanted = [((48, 128), torch.bfloat16), ((128, 128), torch.bfloat16)]
    assert _kept(forgetting, x, weight, input_is_free=True) == wanted


def test_layers_are_told_together_whether_to_keep_their_weights_copies() -> None:
    model = _Model().to(DEVICE, torch.bfloat16)
    apply_precision(model, "fp8-tensorwise")
    layer: Any = model.layers[0]["qkv"]  # type: ignore[index]
    before = layer.linear_method.quantize_weight(layer.weight, transpose=True)
    assert layer.linear_method.quantize_weight(layer.weight, transpose=True) is before
    cache_fp8_weights(model, False)
    again = layer.linear_method.quantize_weight(layer.weight, transpose=True)
    assert layer.linear_method.quantize_weight(layer.weight, transpose=True) is not again
    cache_fp8_weights(model, True)
    assert layer.linear_method.caches_weights


def test_the_weights_copies_are_renewed_only_when_the_weight_has_changed() -> None:
    layer, weight = Fp8TrainingLinearMethod(RECIPES["fp8-tensorwise"]), _made(128, 256)
    first = layer.quantize_weight(weight, transpose=True)
    assert layer.quantize_weight(weight, transpose=True) is first
    assert layer.quantize_weight(weight, transpose=False) is first
    with torch.no_grad():
        weight.mul_(2)
    second = layer.quantize_weight(weight, transpose=True)
    torch.testing.assert_close(second.direct.scale, 2 * first.direct.scale)
    torch.autograd.graph.increment_version(weight)  # as a kernel of our own has to
    assert layer.quantize_weight(weight, transpose=True) is not second
    assert layer.quantize_weight(_made(128, 256), transpose=True) is not second


def test_a_copy_without_transpose_is_completed_when_backward_needs_it() -> None:
    layer, weight = Fp8TrainingLinearMethod(RECIPES["fp8-rowwise"]), _made(128, 256)
    assert layer.quantize_weight(weight, transpose=False).transposed is None
    assert layer.quantize_weight(weight, transpose=True).transposed is not None


def test_backward_uses_the_weight_of_its_forward() -> None:
    """As in torch, a weight changed in between must not go unnoticed where it is read again."""
    x, weight = _made(16, 128), _made(128, 128)
    layer = Fp8TrainingLinearMethod(EXTREMES["blockwise, no weights kept"])
    y = layer(x, weight, None)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()  # type: ignore[no-untyped-call]


def test_without_gradients_nothing_is_transposed() -> None:
    layer, x, weight = (
        Fp8TrainingLinearMethod(RECIPES["fp8-tensorwise"]),
        _made(16, 128),
        _made(128, 128),
    )
    with torch.no_grad():
        layer(x, weight, None)
    assert layer.quantize_weight(weight, transpose=False).transposed is None


def test_inference_tensors_are_taken() -> None:
    with torch.inference_mode():
        x, weight = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
        assert Fp8TrainingLinearMethod(RECIPES["fp8-rowwise"])(x, weight, None).shape == (16, 16)


@every_recipe
def test_gradients_come_in_the_format_the_weight_asks_for(recipe: Fp8Recipe) -> None:
    x, weight = _made(32, 128), _made(128, 128).detach().requires_grad_()
    weight.grad_dtype = torch.float32
    torch.autograd.backward(Fp8TrainingLinearMethod(recipe)(x, weight, None).square().sum())
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad.bfloat16().float(), weight.grad)


@each_scaling
def test_bias_and_frozen_parts(recipe: Fp8Recipe) -> None:
    x, weight, bias = _made(32, 128), _made(128, 128), _made(128)
    plain = Fp8TrainingLinearMethod(recipe)(x, weight, None).detach()
    x.requires_grad_(False)
    weight.requires_grad_(False)
    y = Fp8TrainingLinearMethod(recipe)(x, weight, bias)
    torch.testing.assert_close(y, plain + bias, rtol=2e-2, atol=2e-2)
    (db,) = torch.autograd.grad(y.sum(), (bias,))
    torch.testing.assert_close(db, torch.full_like(bias, 32))


def test_no_tokens_give_no_output() -> None:
    y, dx, dw = _run(Fp8TrainingLinearMethod(RECIPES["fp8-rowwise"]), _made(0, 32), _made(16, 32))
    assert (y.shape, dx.shape) == ((0, 16), (0, 32))
    assert not dw.any()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("way", ["tensor", "row", "1x128 1x128", "1x128 128x128", "128x128 1x128"])
def test_operands_lie_as_torchs_product_on_a_gpu_wants_them(way: str, turned: bool) -> None:
    """Torch's own checks of shapes and strides, run without a GPU on tensors without numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    make: dict[str, Any] = {
        "tensor": quantize_tensorwise,
        "row": quantize_rowwise,
        "1x128": lambda x, **more: quantize_blockwise(x, "1x128", **more),
        "128x128": lambda x, **more: quantize_blockwise(x, "128x128", **more),
    }
    kinds = (way.split() * 2)[:2]
    shapes = ((640, 384), (640, 256)) if turned else ((384, 640), (256, 640))
    made = [
        make[kind](torch.ones(shape), transpose=turned)[int(turned)]
        for kind, shape in zip(kinds, shapes, strict=True)
    ]
    assert scaled_mm(*made, dtype=torch.float32).shape == (384, 256)
    with FakeTensorMode():
        a, b = (Fp8Matrix(_on_gpu(each.data), _on_gpu(each.scale), each.scaling) for each in made)
        scale_b = b.scale.t() if b.scaling == "row" else b.scale
        kinds_of = (_KINDS[a.scaling], _KINDS[b.scaling])
        y = torch_scaled_mm(a.data, b.data.t(), a.scale, kinds_of[0], scale_b, kinds_of[1])
    assert y.shape == (384, 256)


def _on_gpu(each: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")


def test_operands_scaled_in_unknown_pairs_are_refused() -> None:
    x = torch.ones(16, 32)
    one, other = quantize_rowwise(x).direct, quantize_tensorwise(torch.ones(16, 48)).direct
    with pytest.raises(InputError, match="row and tensor") as caught:
        scaled_mm(one, other, dtype=torch.float32)
    assert len(caught.value.problems) == 2


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 1024)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": Linear(1024, 1536),
                    "odd": Linear(1024, 1000),
                    "router": Linear(1024, 1024),
                    "gates": Linear(1024, 64),
                }
            )
            for _ in range(2)
        )
        self.head = Linear(1024, 2048)


def test_layers_are_converted_where_it_is_safe_and_pays() -> None:
    model = _Model()
    report = apply_precision(model, "fp8-tensorwise")
    assert report.converted_modules == ("layers.0.qkv", "layers.1.qkv")
    assert report.skipped_modules["head"] == "head is kept"
    assert report.skipped_modules["layers.0.router"] == "router is kept"
    assert "no multiple of 16" in report.skipped_modules["layers.1.odd"]
    assert "too small" in report.skipped_modules["layers.1.gates"]
    assert model.layers[0]["qkv"].recipe == "fp8-tensorwise"  # type: ignore[index]
    assert model.head.recipe == "bf16"
    assert "fp8-tensorwise: 2 GEMMs, 7 in bf16" in str(report)


def test_what_is_kept_and_how_small_can_be_chosen() -> None:
    report = apply_precision(_Model(), "fp8-rowwise", keep=(*SKIPPED_MODULES, "qkv"), smallest=0)
    assert report.converted_modules == ("layers.0.gates", "layers.1.gates")


def test_a_precision_that_is_not_fp8_puts_layers_back() -> None:
    model = _Model()
    apply_precision(model, "fp8-rowwise")
    assert apply_precision(model, "bf16").converted_modules == ()
    assert model.layers[0]["qkv"].recipe == "bf16"  # type: ignore[index]


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="fp8-tensorwise, fp8-rowwise, fp8-blockwise"):
        apply_precision(_Model(), "nvfp4")


def test_a_copied_model_has_its_own_weights_copies() -> None:
    model = Linear(128, 128, dtype=torch.bfloat16, device=DEVICE)
    apply_precision(model, "fp8-tensorwise", smallest=0)
    nn.init.normal_(model.weight)
    x = _made(16, 128)
    before = model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(model(x), before)
    assert not twin(x).any()


def test_training_in_fp8_learns_what_training_in_bf16_learns() -> None:
    learned = {}
    for precision in ("bf16", *RECIPES):
        torch.manual_seed(0)
        model = nn.Sequential(Linear(128, 256), nn.Tanh(), Linear(256, 128)).to(DEVICE)
        for each in model.parameters():
            nn.init.normal_(each, std=0.1)
        apply_precision(model, precision, smallest=0)
        x = torch.randn(128, 128, device=DEVICE)
        wanted = torch.roll(x, 1, 1).tanh()
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
        for _ in range(15):
            loss = (model(x) - wanted).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        learned[precision] = losses[0] - losses[-1]
    assert learned["bf16"] > 1
    for precision in RECIPES:
        assert abs(learned[precision] / learned["bf16"] - 1) < 0.01, learned
