"""A linear layer must be torch's, and keep nothing for backward but its operands."""

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import torch
from torch import nn

from meshwright.run.kernels.gemm.gemm import TorchGemm
from meshwright.run.nn.linear.linear import Linear, linear, set_gemm_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=random).to(DEVICE, dtype).requires_grad_()


def _gradients(y: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    return torch.autograd.grad((y * weights).sum(), of)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (2, 1, 3, 8)], ids=str)
def test_values_and_gradients_are_those_of_torch(bias: bool, shape: tuple[int, ...]) -> None:
    x, weight, offset = _made(*shape), _made(5, 8), _made(5) if bias else None
    given = [each for each in (x, weight, offset) if each is not None]
    y, wanted = linear(x, weight, offset), nn.functional.linear(x, weight, offset)
    torch.testing.assert_close(y, wanted)
    for found, exact in zip(_gradients(y, *given), _gradients(wanted, *given), strict=True):
        torch.testing.assert_close(found, exact)


def test_strided_inputs_and_gradients_are_taken() -> None:
    x, weight = _made(4, 16)[:, 3:11], _made(6, 8)
    y = linear(x, weight)
    torch.testing.assert_close(y, x @ weight.t())
    (found,) = torch.autograd.grad(y.sum(), (weight,))  # the gradient of a sum is expanded
    torch.testing.assert_close(found, x.detach().sum(0).expand(6, 8))


def test_a_float32_weight_gets_its_gradient_in_float32() -> None:
    x, weight = _made(64, 8, dtype=torch.bfloat16), _made(6, 8)
    y = linear(x, weight)
    (found,) = _gradients(y, weight)
    assert (y.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    steps = torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape).bfloat16()
    torch.testing.assert_close(found, steps.float().t() @ x.detach().float())


def test_a_weight_can_ask_for_its_gradient_in_another_format() -> None:
    x, weight = _made(64, 8, dtype=torch.bfloat16), _made(6, 8, dtype=torch.bfloat16)
    leaf = weight.detach().requires_grad_()
    leaf.grad_dtype = torch.float32
    torch.autograd.backward(linear(x, leaf), torch.ones(64, 6, device=DEVICE).bfloat16())
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, x.detach().float().sum(0).expand(6, 8))


def test_only_x_and_the_weight_are_kept_for_backward() -> None:
    x, weight, bias = _made(4, 8), _made(6, 8), _made(6)
    kept: list[int] = []

    def pack(each: torch.Tensor) -> torch.Tensor:
        kept.append(each.data_ptr())
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        linear(x, weight, bias)
    assert sorted(kept) == sorted((x.data_ptr(), weight.data_ptr()))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    given = {"x": _made(4, 8), "weight": _made(6, 8)}
    given[frozen].requires_grad_(False)
    torch.autograd.backward(linear(given["x"], given["weight"]).sum())
    assert {name: each.grad is None for name, each in given.items()} == {
        name: name == frozen for name in given
    }


def test_a_layer_has_the_parameters_of_torchs() -> None:
    layer, other = Linear(8, 6, bias=True), nn.Linear(8, 6)
    shapes = {name: each.shape for name, each in layer.state_dict().items()}
    assert shapes == {name: each.shape for name, each in other.state_dict().items()}
    layer.load_state_dict(other.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), other(x))
    assert [name for name, _ in Linear(8, 6).named_parameters()] == ["weight"]


def test_a_layer_can_be_made_without_memory() -> None:
    layer = Linear(8, 6, device="meta", dtype=torch.bfloat16)
    assert layer.weight.is_meta
    assert repr(layer) == "Linear(8 → 6, bias=False, bf16)"


class _Doubled(TorchGemm):
    def forward(self, x_NK: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x_NK, w_MK)


def test_products_are_set_from_outside() -> None:
    module = nn.Sequential(Linear(8, 6), nn.Sequential(Linear(6, 4)))
    for each in module.parameters():
        nn.init.normal_(each)
    x = torch.randn(3, 8)
    before = module(x)
    set_gemm_backend(module, _Doubled())
    torch.testing.assert_close(module(x), 4 * before)


def test_a_frozen_weight_keeps_no_input() -> None:
    x, weight = _made(6, 8), _made(5, 8)
    frozen, kept = weight.detach(), list[tuple[int, ...]]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = linear(x, frozen)
    assert kept == [(5, 8)]
    torch.testing.assert_close(_gradients(y, x), _gradients(linear(x, weight), x))
