"""What the fused head must compute: the losses and gradients of all logits at once."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from meshwright.errors import InputError
from meshwright.run.kernels.gemm.gemm import TorchGemm
from meshwright.run.kernels.loss.linear_cross_entropy import (
    CrossEntropySums,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
Tensors = dict[str, Any]


def _made(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, bias: bool = False) -> Tensors:
    random = torch.Generator().manual_seed(7)
    made = {
        "x_ND": torch.randn(tokens, hidden, generator=random),
        "weight_VD": torch.randn(vocab, hidden, generator=random) / hidden**0.5,
    }
    if bias:
        made["bias"] = torch.randn(vocab, generator=random)
    made = {name: each.to(DEVICE, dtype).requires_grad_() for name, each in made.items()}
    labels = torch.randint(vocab, (tokens,), generator=random)
    labels[1::4] = -100
    return {**made, "labels_N": labels.to(DEVICE)}


def _exact(given: Tensors, **rule: Any) -> tuple[CrossEntropySums, Tensors]:
    """The same from the same numbers in float64, with all logits."""
    wide = {
        name: each.detach().double().requires_grad_() if each.is_floating_point() else each
        for name, each in given.items()
    }
    sums = linear_cross_entropy_reference(**wide, **rule)
    torch.autograd.backward(3 * sums.loss_sum)
    return sums, {n: t.grad for n, t in wide.items() if t.grad is not None}


def _assert_close(found: torch.Tensor | None, exact: torch.Tensor, tolerance: float) -> None:
    assert found is not None
    error = (found.double() - exact).norm() / exact.norm().clamp_min(1e-30)
    assert error <= tolerance, float(error)


def _assert_equals_exact(given: Tensors, tolerance: float, **options: Any) -> None:
    rule = {name: options[name] for name in ("softcap", "scale", "z_loss") if name in options}
    exact, exact_grads = _exact(given, **rule)
    sums = linear_cross_entropy(**given, **options)
    torch.autograd.backward(3 * sums.loss_sum)
    assert sums.count == exact.count
    _assert_close(sums.loss_sum, exact.loss_sum.double(), tolerance)
    torch.testing.assert_close(
        sums.z_loss_sum.double(), exact.z_loss_sum.double(), rtol=tolerance, atol=1e-6
    )
    for name, gradient in exact_grads.items():
        assert given[name].grad is not None
        assert given[name].grad.dtype == given[name].dtype
        _assert_close(given[name].grad, gradient, tolerance)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [128, 131])
def test_losses_and_gradients_are_those_of_all_logits(
    backend: str, dtype: torch.dtype, vocab: int
) -> None:
    _assert_equals_exact(_made(24, 16, vocab, dtype), TOLERANCE[dtype], backend=backend)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(
    "rule",
    [
        {"softcap": 3.0},
        {"scale": 0.25},
        {"z_loss": 0.01},
        {"softcap": 2.0, "scale": 3.0, "z_loss": 0.1},
    ],
    ids=["softcap", "scale", "z-loss", "all"],
)
def test_rules_of_the_loss_reach_the_gradients(backend: str, rule: dict[str, float]) -> None:
    given = _made(12, 8, 96, torch.float32, bias=True)
    _assert_equals_exact(given, 2e-5, backend=backend, **rule)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_change_the_result(backend: str, dtype: torch.dtype) -> None:
    given = _made(50, 8, 80, dtype, bias=True)
    chunk_bytes = 16 * 80 * given["x_ND"].element_size()
    _assert_equals_exact(given, TOLERANCE[dtype], backend=backend, chunk_bytes=chunk_bytes)


def test_a_vocabulary_of_several_blocks_with_a_rest() -> None:
    _assert_equals_exact(_made(3, 4, 2 * 8192 + 70, torch.float32), 2e-5, backend="triton")


def test_large_logits_do_not_overflow() -> None:
    given = _made(8, 8, 64, torch.float32)
    given["x_ND"] = (given["x_ND"].detach() * 1000).requires_grad_()
    _assert_equals_exact(given, 2e-5, backend="triton")


def test_fp32_weights_get_fp32_gradients_from_bf16_inputs() -> None:
    given = _made(16, 8, 64, torch.bfloat16)
    given["weight_VD"] = given["weight_VD"].detach().float().requires_grad_()
    _assert_equals_exact(given, 2e-2)


def test_gradients_come_in_the_format_the_weight_asks_for() -> None:
    given = _made(16, 8, 64, torch.bfloat16)
    given["weight_VD"].grad_dtype = torch.float32
    torch.autograd.backward(linear_cross_entropy(**given).loss_sum)
    assert given["weight_VD"].grad.dtype == torch.float32
    rounded = given["weight_VD"].grad.bfloat16().float()
    assert not torch.equal(rounded, given["weight_VD"].grad)


def test_nothing_counts_where_every_label_is_ignored() -> None:
    given = _made(4, 8, 64, torch.float32)
    given["labels_N"].fill_(-100)
    sums = linear_cross_entropy(**given, backend="triton")
    torch.autograd.backward(sums.loss_sum)
    assert (sums.loss_sum.item(), sums.count.item()) == (0, 0)
    assert not given["weight_VD"].grad.any()


def test_another_label_can_be_the_ignored_one() -> None:
    given = _made(6, 8, 64, torch.float32)
    given["labels_N"][:] = torch.tensor([3, 0, 0, 5, 0, 7])
    assert linear_cross_entropy(**given, ignore=0, backend="triton").count == 3


def test_no_tokens_give_no_loss() -> None:
    given = _made(0, 8, 64, torch.float32)
    sums = linear_cross_entropy(**given)
    torch.autograd.backward(sums.loss_sum)
    assert sums.loss_sum.item() == 0
    assert not given["weight_VD"].grad.any()


def test_only_what_needs_a_gradient_gets_one() -> None:
    given = _made(8, 8, 64, torch.float32)
    given["weight_VD"].requires_grad_(False)
    torch.autograd.backward(linear_cross_entropy(**given).loss_sum)
    assert given["x_ND"].grad is not None
    assert given["weight_VD"].grad is None


def test_without_gradients_the_loss_is_the_same_and_final() -> None:
    given = _made(24, 8, 64, torch.float32)
    with torch.no_grad():
        sums = linear_cross_entropy(**given, chunk_bytes=8 * 64 * 4, backend="triton")
    assert not sums.loss_sum.requires_grad
    _assert_close(sums.loss_sum, _exact(given)[0].loss_sum, 1e-5)


def test_a_label_outside_the_vocabulary_is_not_passed_over() -> None:
    given = _made(4, 8, 64, torch.float32)
    given["labels_N"][0] = 64
    assert linear_cross_entropy(**given, backend="triton").loss_sum.isnan()


def test_shapes_that_do_not_fit_are_all_named() -> None:
    given = _made(4, 8, 64, torch.float32)
    with pytest.raises(InputError, match="do not fit") as caught:
        linear_cross_entropy(
            given["x_ND"], given["weight_VD"], given["labels_N"][:3], bias=torch.zeros(5), softcap=0
        )
    assert len(caught.value.problems) == 3


class _Watched(TorchGemm):
    """Remembers how many tokens each chunk had."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def forward(self, x_NK: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        self.tokens.append(x_NK.shape[0])
        return super().forward(x_NK, w_MK)


def test_the_buffer_of_logits_is_bounded() -> None:
    watched = _Watched()
    given = _made(100, 8, 64, torch.float32)
    linear_cross_entropy(**given, chunk_bytes=40 * 64 * 4, gemm=watched)
    assert watched.tokens == [34, 34, 32]


def test_one_chunk_is_taken_where_two_would_save_no_memory() -> None:
    """Two chunks of 16 would spare 16 × 64 logits, and need 64 × 64 sums in their place."""
    watched = _Watched()
    given = _made(32, 64, 64, torch.float32)
    linear_cross_entropy(**given, chunk_bytes=16 * 64 * 4, gemm=watched)
    given["weight_VD"].requires_grad_(False)
    linear_cross_entropy(**given, chunk_bytes=16 * 64 * 4, gemm=watched)
    assert watched.tokens == [32, 16, 16]
