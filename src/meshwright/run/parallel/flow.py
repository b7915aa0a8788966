"""Collectives that gradients flow through; each one's backward is another's forward.

    copy_in        nothing forward, a sum backward             what every rank reads whole
    sum_out        a sum forward, nothing backward             what every rank has a part of
    gather_in      all parts side by side, backward a sum cut into parts
    scatter_out    a sum cut into parts, backward all parts side by side
    take_part      this rank's part, backward all parts side by side
    join_parts     all parts side by side, backward this rank's part
    trade          rows to other ranks, backward rows back

The last two pairs differ in who computes what comes after: every rank the same (`take_part`,
`join_parts`), or every rank a share of it (`gather_in`, `scatter_out`).
"""

# Autograd's own functions are untyped.
# mypy: allow-untyped-calls

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.run.parallel.group import Group


def copy_in(x: Tensor, group: Group) -> Tensor:
    """Hand a tensor that all ranks share to work each does a part of."""
    return x if group.size == 1 else _one(_CopyIn.apply(x, group))


def sum_out(x: Tensor, group: Group) -> Tensor:
    """Add up what each rank has a part of."""
    return x if group.size == 1 else _one(_SumOut.apply(x, group))


def gather_in(x: Tensor, group: Group, dim: int) -> Tensor:
    """Lay the ranks' parts side by side, for work each does a part of."""
    return x if group.size == 1 else _one(_GatherIn.apply(x, group, dim))


def scatter_out(x: Tensor, group: Group, dim: int) -> Tensor:
    """Add up what each rank has a part of, and keep this rank's share along an axis."""
    return x if group.size == 1 else _one(_ScatterOut.apply(x, group, dim))


def take_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """Keep this rank's share, along an axis, of what all ranks have whole."""
    return x if group.size == 1 else _one(_TakePart.apply(x, group, dim))


def join_parts(x: Tensor, group: Group, dim: int) -> Tensor:
    """Lay the ranks' parts side by side, for work that all ranks do alike."""
    return x if group.size == 1 else _one(_JoinParts.apply(x, group, dim))


def trade(
    x: Tensor, group: Group, sent: Sequence[int] | None = None, got: Sequence[int] | None = None
) -> Tensor:
    """Send rows to the ranks of a group, the first `sent[0]` to its first, and return those got."""
    return x if group.size == 1 else _one(_Trade.apply(x, group, sent, got))


def _one(found: Any) -> Tensor:
    result: Tensor = found
    return result


def _part(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.chunk(group.size, dim)[group.index].contiguous()


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_reduce(grads[0].contiguous().clone()), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.reduce_scatter(grads[0], ctx.dim), None, None


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_gather(grads[0], ctx.dim), None, None


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _part(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_gather(grads[0], ctx.dim), None, None


class _JoinParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _part(grads[0], ctx.group, ctx.dim), None, None


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sent: Sequence[int] | None, got: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.got = group, sent, got
        return group.all_to_all(x, sent, got)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_to_all(grads[0], ctx.got, ctx.sent), None, None, None
