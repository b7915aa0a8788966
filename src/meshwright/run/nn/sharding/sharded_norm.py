"""Norms of rows of which each rank has a part, as those of the queries and keys of all heads.

    r = 1/√(Σ x² / D + eps),  y = x · r · w                 D and Σ are of whole rows
    dx = r · (g − n · Σ (g · n) / D),  g = dy · w,  n = x · r
    dw = Σ over rows of dy · n                              of this rank's part

Both sums go through the ranks, one forward and one backward; those of several tensors travel
together, a number for each row and tensor. A layer norm subtracts the mean first, at one more sum
each way. Statistics are float32 and results are rounded once; x and r are kept for backward.

Who adds up is set from outside; nothing here knows of groups.
"""

# Autograd's own functions are untyped, and take their arguments by position.
# mypy: allow-untyped-calls

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.run.nn.norm import NormLayer

AllReduceSum = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over all ranks; it may change the one it is given."""


class NormShard(NamedTuple):
    """What a rank has of some rows, and how they are normalised."""

    x: Tensor
    """Its part of the last axis."""
    norm: NormLayer
    """With its part of the weights."""
    global_width: int
    """Of whole rows."""
    replicas: int = 1
    """Ranks that have the same part, each for work of its own."""


class _Rule(NamedTuple):
    """How one of the tensors is normalised."""

    width: int
    """By which sums over all ranks are divided: whole rows, and copies of them."""
    eps: float
    unit_offset: bool
    centred: bool


def apply_sharded_norm(parts: Sequence[NormShard], total: AllReduceSum) -> list[Tensor]:
    """Normalise the last axis of tensors, of which all ranks have a part each."""
    rules = tuple(
        _Rule(
            part.global_width * part.replicas,
            part.norm.eps,
            part.norm.unit_offset,
            part.norm.kind != "rms",
        )
        for part in parts
    )
    given = [*(part.x for part in parts), *(part.norm.weight for part in parts)]
    found: Sequence[Tensor] = _NormAcross.apply(total, rules, *given)
    return [
        out if part.norm.bias is None else out + part.norm.bias
        for part, out in zip(parts, found, strict=True)
    ]


class _NormAcross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, total: AllReduceSum, rules: tuple[_Rule, ...], *given: Tensor | None
    ) -> Any:
        count = len(rules)
        xs, weights = [_there(x) for x in given[:count]], given[count:]
        xs = _centred(xs, rules, total)
        squares = _means([_exact(x).square().sum(-1, keepdim=True) for x in xs], rules, total)
        scales = [
            square.add_(rule.eps).rsqrt_() for square, rule in zip(squares, rules, strict=True)
        ]
        ctx.save_for_backward(*xs, *scales, *weights)
        ctx.total, ctx.rules = total, rules
        found = []
        for x, scale, weight, rule in zip(xs, scales, weights, rules, strict=True):
            normed = _exact(x) * scale
            if weight is not None:
                normed *= _factor(weight, normed, rule)
            found.append(normed.to(x.dtype))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rules, count = ctx.rules, len(ctx.rules)
        saved = ctx.saved_tensors
        xs, scales, weights = saved[:count], saved[count : 2 * count], saved[2 * count :]
        dxs: list[Tensor] = []
        dweights: list[Tensor | None] = []
        normed: list[Tensor] = []
        for x, scale, weight, dy, rule in zip(xs, scales, weights, grads, rules, strict=True):
            normed.append(_exact(x) * scale)
            slopes = _exact(dy)
            if weight is None:
                dxs.append(slopes.clone())
                dweights.append(None)
                continue
            rows = (slopes * normed[-1]).reshape(-1, x.shape[-1])
            dweights.append(rows.sum(0).to(weight.dtype))
            dxs.append(slopes * _factor(weight, slopes, rule))
        along = _means(
            [(dx * n).sum(-1, keepdim=True) for dx, n in zip(dxs, normed, strict=True)],
            rules,
            ctx.total,
        )
        for dx, n, mean, scale in zip(dxs, normed, along, scales, strict=True):
            dx.addcmul_(n, mean, value=-1).mul_(scale)
        dxs = _centred(dxs, rules, ctx.total)
        return None, None, *(dx.to(x.dtype) for dx, x in zip(dxs, xs, strict=True)), *dweights


def _centred(xs: list[Tensor], rules: Sequence[_Rule], total: AllReduceSum) -> list[Tensor]:
    """Subtract the mean of whole rows where the norm does; its gradient is the same again."""
    if not any(rule.centred for rule in rules):
        return xs
    means = _means([_exact(x).sum(-1, keepdim=True) for x in xs], rules, total)
    return [
        (_exact(x) - mean).to(x.dtype) if rule.centred else x
        for x, mean, rule in zip(xs, means, rules, strict=True)
    ]


def _means(sums: list[Tensor], rules: Sequence[_Rule], total: AllReduceSum) -> list[Tensor]:
    """Turn sums over this rank's parts into means over whole rows, with one exchange."""
    added = total(torch.cat(sums, -1)).split(1, -1)
    return [one / rule.width for one, rule in zip(added, rules, strict=True)]


def _there(x: Tensor | None) -> Tensor:
    assert x is not None, "only weights may be missing"
    return x


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _factor(weight: Tensor, like: Tensor, rule: _Rule) -> Tensor:
    factor = weight.to(like.dtype)
    return factor + 1 if rule.unit_offset else factor
