"""Letters: N tokens, k experts per token, R = N·k sorted rows, X experts, D width, F inner."""

import pytest
import torch
from torch import Tensor

from meshwright.run.kernels.moe import grouped_gemm_kernel
from meshwright.run.kernels.moe.down_proj_combine import (
    grouped_down_proj_combine,
    grouped_down_proj_combine_reference,
)
from meshwright.run.kernels.moe.grouped_gemm_kernel import GroupedGemmTiles
from meshwright.run.kernels.moe.token_permutation import TokenPermutation, sort_by_expert

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Triton's interpreter multiplies bfloat16 as if it were integers; float16 takes the same code.
DTYPES = (torch.float32, torch.bfloat16 if GPU else torch.float16)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        small = GroupedGemmTiles(16, 16, 16, warps=4, stages=2)
        monkeypatch.setattr(grouped_gemm_kernel, "select_grouped_tiles", lambda _: small)


def operands(dtype: torch.dtype) -> tuple[list[Tensor], TokenPermutation, Tensor]:
    torch.manual_seed(3)
    order = sort_by_expert(torch.rand(7, 5).topk(3).indices.to(DEVICE), 5)
    shapes = ((21, 24), (5, 40, 24), (7, 3), (5, 40), (7, 40))
    act, down, weights, bias, dout = (torch.randn(shape, device=DEVICE) for shape in shapes)
    rounded = [each.to(dtype) for each in (act, down / 5, bias)]
    return [rounded[0], rounded[1], weights.softmax(-1), rounded[2]], order, dout.to(dtype)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_those_of_float64(dtype: torch.dtype, biased: bool) -> None:
    given, order, dout = operands(dtype)
    held = [each.clone().requires_grad_() for each in given[: 3 + biased]]
    bias = held[3] if biased else None
    out = grouped_down_proj_combine(
        held[0], held[1], order, held[2], bias_XD=bias, backend="triton"
    )
    found = [out.detach(), *torch.autograd.grad(out, held, dout)]

    exact = [each.detach().double().requires_grad_() for each in held]
    bias = exact[3] if biased else None
    reference = grouped_down_proj_combine_reference(
        exact[0], exact[1], order, exact[2], bias_XD=bias
    )
    wanted = [reference.detach(), *torch.autograd.grad(reference, exact, dout.double())]
    for ours, theirs in zip(found, wanted, strict=True):
        # Products and sums that follow each other round twice to the operands' precision.
        scale = theirs.abs().max().clamp(min=1.0)
        error = ((ours.double() - theirs).abs().max() / scale).item()
        assert error < max(2 * torch.finfo(dtype).eps, 4e-6)


def test_what_the_experts_gave_is_not_kept_for_backward() -> None:
    given, order, _ = operands(torch.float32)
    kept: list[Tensor] = []

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    act, down, weights = (each.clone().requires_grad_() for each in given[:3])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        grouped_down_proj_combine(act, down, order, weights, backend="triton")
    rows, width = act.shape[0], down.shape[1]
    assert (rows, width) not in {tuple(each.shape) for each in kept}
    assert any(each.shape == act.shape for each in kept)
