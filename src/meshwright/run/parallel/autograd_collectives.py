"""Collectives that gradients flow through; each one's backward is another's forward.

    copy_to_region                        nothing forward, a sum backward: what all ranks read
    reduce_from_region                    a sum forward, nothing backward: what all have a part of
    gather_from_sequence_region           all parts side by side, backward a sum cut into parts
    reduce_scatter_to_sequence_region     a sum cut into parts, backward all parts side by side
    scatter_to_region                     this rank's part, backward all parts side by side
    gather_from_region                    all parts side by side, backward this rank's part
    all_to_all                            rows to other ranks, backward rows back
    start_all_to_all, finish_all_to_all   the same in two steps, with other work in between

Two pairs differ in who computes what comes after: every rank the same (`scatter_to_region`,
`gather_from_region`), or every rank a share of it (`gather_from_sequence_region`,
`reduce_scatter_to_sequence_region`).

What is exchanged in backward is written down with the line of the forward: torch's engine has none.
"""

# Autograd's own functions are untyped, and hand over arguments by position.
# mypy: allow-untyped-calls
# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.run.parallel.flight_recorder import CallSite, find_call_site
from meshwright.run.parallel.group_coordinator import AsyncWork, GroupCoordinator


def copy_to_region(x: Tensor, group: GroupCoordinator) -> Tensor:
    """Hand a tensor that all ranks share to work each does a part of."""
    return x if group.size == 1 else _one(_CopyIn.apply(x, group))


def reduce_from_region(x: Tensor, group: GroupCoordinator) -> Tensor:
    """Add up what each rank has a part of."""
    return x if group.size == 1 else _one(_SumOut.apply(x, group))


def gather_from_sequence_region(x: Tensor, group: GroupCoordinator, dim: int) -> Tensor:
    """Lay the ranks' parts side by side, for work each does a part of."""
    return _along(x, group, dim, GroupCoordinator.all_gather, GroupCoordinator.reduce_scatter)


def reduce_scatter_to_sequence_region(x: Tensor, group: GroupCoordinator, dim: int) -> Tensor:
    """Add up what each rank has a part of, and keep this rank's share along an axis."""
    return _along(x, group, dim, GroupCoordinator.reduce_scatter, GroupCoordinator.all_gather)


def scatter_to_region(x: Tensor, group: GroupCoordinator, dim: int) -> Tensor:
    """Keep this rank's share, along an axis, of what all ranks have whole."""
    return _along(x, group, dim, _part, GroupCoordinator.all_gather)


def gather_from_region(x: Tensor, group: GroupCoordinator, dim: int) -> Tensor:
    """Lay the ranks' parts side by side, for work that all ranks do alike."""
    return _along(x, group, dim, GroupCoordinator.all_gather, _part)


def all_to_all(
    x: Tensor,
    group: GroupCoordinator,
    sent: Sequence[int] | None = None,
    got: Sequence[int] | None = None,
) -> Tensor:
    """Send rows to the ranks of a group, the first `sent[0]` to its first, and return those got."""
    return x if group.size == 1 else _one(_Trade.apply(x, group, sent, got))


class AsyncAllToAll:
    """Rows on their way to other ranks, or their gradients on the way back."""

    def __init__(
        self,
        group: GroupCoordinator,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
    ) -> None:
        self.group, self.input_splits, self.output_splits = group, input_splits, output_splits
        self.call_site = find_call_site()
        self.async_work: AsyncWork | None = None
        self.autograd_anchor: Tensor | None = None
        """Of no numbers: ties both ends together in autograd's graph. A single rank's own rows."""

    def start(self, x: Tensor, sent: Sequence[int] | None, got: Sequence[int] | None) -> None:
        """Begin to exchange rows."""
        self.async_work = self.group.start_all_to_all(x, sent, got, where=self.call_site)

    def wait(self) -> Tensor:
        """Return the rows, once they are there."""
        assert self.async_work is not None, "nothing is on its way"
        found, self.async_work = self.async_work.wait(), None
        return found


def start_all_to_all(
    x: Tensor,
    group: GroupCoordinator,
    sent: Sequence[int] | None = None,
    got: Sequence[int] | None = None,
) -> AsyncAllToAll:
    """Start an all-to-all; work before `finish_all_to_all` hides it, in backward likewise."""
    travel = AsyncAllToAll(group, sent, got)
    travel.autograd_anchor = x if group.size == 1 else _one(_Send.apply(x, travel))
    return travel


def finish_all_to_all(travel: AsyncAllToAll) -> Tensor:
    """Return what was sent here."""
    mark, travel.autograd_anchor = travel.autograd_anchor, None
    assert mark is not None, "rows arrive once"
    return mark if travel.group.size == 1 else _one(_Arrive.apply(mark, travel))


def _one(found: Any) -> Tensor:
    result: Tensor = found
    return result


class _Way(Protocol):
    """Divides or joins a tensor along an axis: an operation of `GroupCoordinator`, or none."""

    def __call__(
        self, group: GroupCoordinator, x: Tensor, dim: int, /, *, where: CallSite | None
    ) -> Tensor:
        """Return this rank's result."""


def _part(group: GroupCoordinator, x: Tensor, dim: int, /, *, where: CallSite | None) -> Tensor:
    del where  # nothing is exchanged
    return x.chunk(group.size, dim)[group.index].contiguous()


def _along(x: Tensor, group: GroupCoordinator, dim: int, there: _Way, back: _Way) -> Tensor:
    return x if group.size == 1 else _one(_Along.apply(x, group, dim, there, back))


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupCoordinator) -> Tensor:
        ctx.group, ctx.where = group, find_call_site()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.all_reduce(grads[0].contiguous().clone(), where=ctx.where), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, group: GroupCoordinator) -> Tensor:
        return group.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Along(torch.autograd.Function):
    """One way of dividing or joining an axis forward, and another backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: GroupCoordinator, dim: int, there: _Way, back: _Way
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.back, ctx.where = group, dim, back, find_call_site()
        return there(group, x, dim, where=ctx.where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(ctx.group, grads[0], ctx.dim, where=ctx.where), None, None, None, None


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: GroupCoordinator,
        sent: Sequence[int] | None,
        got: Sequence[int] | None,
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.got, ctx.where = group, sent, got, find_call_site()
        return group.all_to_all(x, sent, got, where=ctx.where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.group.all_to_all(grads[0], ctx.got, ctx.sent, where=ctx.where)
        return back, None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, travel: AsyncAllToAll) -> Tensor:
        ctx.travel = travel
        travel.start(x, travel.input_splits, travel.output_splits)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.travel.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mark: Tensor, travel: AsyncAllToAll) -> Tensor:
        ctx.travel, ctx.empty = travel, mark.detach()
        return travel.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.travel.start(grads[0], ctx.travel.output_splits, ctx.travel.input_splits)
        return ctx.empty, None
