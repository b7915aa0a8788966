"""Rows of which ranks have parts are normalised as whole ones."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="computes norms")

import torch
from torch import Tensor

from meshwright.run.nn.norm import NormLayer
from meshwright.run.nn.sharding.sharded_norm import NormShard, apply_sharded_norm
from meshwright.spec.model import block

KINDS = {
    "rms": block.NormSpec(),
    "rms, unit offset": block.NormSpec(unit_offset=True),
    "layer": block.NormSpec(kind="layer", bias=True),
    "layer, plain": block.NormSpec(kind="layer-plain"),
}
SIZES = (12, 8)


def made(kind: str) -> tuple[list[NormLayer], list[Tensor]]:
    torch.manual_seed(1)
    norms = [NormLayer(size, KINDS[kind], dtype=torch.float64) for size in SIZES]
    for norm in norms:
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
    xs = [torch.randn(3, 5, size, dtype=torch.float64, requires_grad=True) for size in SIZES]
    return norms, xs


def gradients(outs: list[Tensor], norms: list[NormLayer], xs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    loss = sum((out * torch.randn_like(out)).sum() for out in outs)
    assert isinstance(loss, Tensor)
    inputs = [*xs, *(each for norm in norms for each in norm.parameters())]
    return [*outs, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_whole_rows(kind: str, copies: int) -> None:
    norms, xs = made(kind)
    # Ranks that all have whole rows, each as a copy: sums are so many times as large.
    total: Callable[[Tensor], Tensor] = lambda found: found * copies  # noqa: E731
    parts = [NormShard(x, n, x.shape[-1], copies) for x, n in zip(xs, norms, strict=True)]
    found = gradients(apply_sharded_norm(parts, total), norms, xs)
    wanted = gradients([n(x) for x, n in zip(xs, norms, strict=True)], norms, xs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_results_are_rounded_once() -> None:
    norms, xs = made("rms")
    for norm in norms:
        norm.bfloat16()
    given = [x.detach().bfloat16() for x in xs]
    parts = [NormShard(x, n, x.shape[-1]) for x, n in zip(given, norms, strict=True)]
    for found, x, norm in zip(
        apply_sharded_norm(parts, lambda each: each), given, norms, strict=True
    ):
        assert norm.weight is not None
        exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + norm.eps)
        exact = exact * norm.weight.detach().double()
        # A few float32 roundings before the last may tip a number to its neighbour, no further.
        assert float(((found.detach().double() - exact) / exact).abs().max()) < 2**-8
