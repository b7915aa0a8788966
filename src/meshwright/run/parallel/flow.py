"""Collectives that gradients flow through; each one's backward is another's forward.

    copy_in        nothing forward, a sum backward             what every rank reads whole
    sum_out        a sum forward, nothing backward             what every rank has a part of
    gather_in      all parts side by side, backward a sum cut into parts
    scatter_out    a sum cut into parts, backward all parts side by side
    take_part      this rank's part, backward all parts side by side
    join_parts     all parts side by side, backward this rank's part
    trade          rows to other ranks, backward rows back
    send, arrive   the same in two steps, forward and backward, with other work in between

Two pairs differ in who computes what comes after: every rank the same (`take_part`, `join_parts`),
or every rank a share of it (`gather_in`, `scatter_out`).

What is exchanged in backward is written down with the line of the forward: torch's engine has none.
"""

# Autograd's own functions are untyped, and hand over arguments by position.
# mypy: allow-untyped-calls
# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.run.parallel.group import Group, Pending
from meshwright.run.parallel.journal import Where, here


def copy_in(x: Tensor, group: Group) -> Tensor:
    """Hand a tensor that all ranks share to work each does a part of."""
    return x if group.size == 1 else _one(_CopyIn.apply(x, group))


def sum_out(x: Tensor, group: Group) -> Tensor:
    """Add up what each rank has a part of."""
    return x if group.size == 1 else _one(_SumOut.apply(x, group))


def gather_in(x: Tensor, group: Group, dim: int) -> Tensor:
    """Lay the ranks' parts side by side, for work each does a part of."""
    return _along(x, group, dim, Group.all_gather, Group.reduce_scatter)


def scatter_out(x: Tensor, group: Group, dim: int) -> Tensor:
    """Add up what each rank has a part of, and keep this rank's share along an axis."""
    return _along(x, group, dim, Group.reduce_scatter, Group.all_gather)


def take_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """Keep this rank's share, along an axis, of what all ranks have whole."""
    return _along(x, group, dim, _part, Group.all_gather)


def join_parts(x: Tensor, group: Group, dim: int) -> Tensor:
    """Lay the ranks' parts side by side, for work that all ranks do alike."""
    return _along(x, group, dim, Group.all_gather, _part)


def trade(
    x: Tensor, group: Group, sent: Sequence[int] | None = None, got: Sequence[int] | None = None
) -> Tensor:
    """Send rows to the ranks of a group, the first `sent[0]` to its first, and return those got."""
    return x if group.size == 1 else _one(_Trade.apply(x, group, sent, got))


class Travel:
    """Rows on their way to other ranks, or their gradients on the way back."""

    def __init__(self, group: Group, sent: Sequence[int] | None, got: Sequence[int] | None) -> None:
        self.group, self.sent, self.got = group, sent, got
        self.where = here()
        self.pending: Pending | None = None
        self.mark: Tensor | None = None
        """Of no numbers: ties both ends together in autograd's graph. A single rank's own rows."""

    def start(self, x: Tensor, sent: Sequence[int] | None, got: Sequence[int] | None) -> None:
        """Begin to exchange rows."""
        self.pending = self.group.start_all_to_all(x, sent, got, where=self.where)

    def end(self) -> Tensor:
        """Return the rows, once they are there."""
        assert self.pending is not None, "nothing is on its way"
        found, self.pending = self.pending.wait(), None
        return found


def send(
    x: Tensor, group: Group, sent: Sequence[int] | None = None, got: Sequence[int] | None = None
) -> Travel:
    """Begin to `trade`; work done before `arrive` hides it, and its backward the way back."""
    travel = Travel(group, sent, got)
    travel.mark = x if group.size == 1 else _one(_Send.apply(x, travel))
    return travel


def arrive(travel: Travel) -> Tensor:
    """Return what was sent here."""
    mark, travel.mark = travel.mark, None
    assert mark is not None, "rows arrive once"
    return mark if travel.group.size == 1 else _one(_Arrive.apply(mark, travel))


def _one(found: Any) -> Tensor:
    result: Tensor = found
    return result


class _Way(Protocol):
    """Divides or joins a tensor along an axis: an operation of `Group`, or none."""

    def __call__(self, group: Group, x: Tensor, dim: int, /, *, where: Where | None) -> Tensor:
        """Return this rank's result."""


def _part(group: Group, x: Tensor, dim: int, /, *, where: Where | None) -> Tensor:
    del where  # nothing is exchanged
    return x.chunk(group.size, dim)[group.index].contiguous()


def _along(x: Tensor, group: Group, dim: int, there: _Way, back: _Way) -> Tensor:
    return x if group.size == 1 else _one(_Along.apply(x, group, dim, there, back))


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.where = group, here()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_reduce(grads[0].contiguous().clone(), where=ctx.where), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Along(torch.autograd.Function):
    """One way of dividing or joining an axis forward, and another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, there: _Way, back: _Way) -> Tensor:
        ctx.group, ctx.dim, ctx.back, ctx.where = group, dim, back, here()
        return there(group, x, dim, where=ctx.where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(ctx.group, grads[0], ctx.dim, where=ctx.where), None, None, None, None


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sent: Sequence[int] | None, got: Sequence[int] | None
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.got, ctx.where = group, sent, got, here()
        return group.all_to_all(x, sent, got, where=ctx.where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.group.all_to_all(grads[0], ctx.got, ctx.sent, where=ctx.where)
        return back, None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        travel.start(x, travel.sent, travel.got)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.travel.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mark: Tensor, travel: Travel) -> Tensor:
        ctx.travel, ctx.empty = travel, mark.detach()
        return travel.end()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.travel.start(grads[0], ctx.travel.got, ctx.travel.sent)
        return ctx.empty, None
