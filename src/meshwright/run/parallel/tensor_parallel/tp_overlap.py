"""Tensor-parallel products in pieces, so that tokens travel while others are multiplied.

With sequence parallelism the first product of a part reads the tokens of all ranks, and the sum
after its last product is scattered over them. Here neither is one collective: ranks pass tokens, or
sums that grow, around a ring and multiply what they have meanwhile (Wang et al., "Overlap
communication with dependent computation", ASPLOS 2023). n ranks make n - 1 exchanges of a piece,
which together carry as much as the collective; each is issued before the product that hides it.

Shapes: B sequences, t = T/n tokens of a rank, K and M the product's sides.
"""

# Autograd's own functions are untyped, and hand over arguments by position.
# mypy: allow-untyped-calls
# ruff: noqa: PLR0917

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.run.kernels.autograd import get_grad_dtype
from meshwright.run.kernels.gemm.gemm import GemmBackend, compute_wgrad_in_dtype, view_as_matrix
from meshwright.run.parallel.flight_recorder import CallSite, find_call_site
from meshwright.run.parallel.group_coordinator import AsyncWork, GroupCoordinator, P2PMessage


def all_gather_matmul(
    group: GroupCoordinator,
    x_BtK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gemm: GemmBackend,
) -> Tensor:
    """Return (B, T, M) of a rank's tokens: all tokens, the columns that this rank makes."""
    y: Tensor = _GatherProduct.apply(x_BtK, weight, bias, group, gemm)
    return y


def matmul_reduce_scatter(
    group: GroupCoordinator,
    x_BTK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gemm: GemmBackend,
) -> Tensor:
    """Return (B, t, M) of all tokens: this rank's, summed over the ranks' parts of the product."""
    y: Tensor = _ProductScatter.apply(x_BTK, weight, bias, group, gemm)
    return y


class _Job(NamedTuple):
    weight: Tensor
    products: GemmBackend

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x_NK, weight = view_as_matrix(x), self.weight.to(x.dtype)
        if bias is None:
            y_NM = self.products.forward(x_NK, weight)
        else:
            y_NM = torch.addmm(bias.to(x.dtype), x_NK, weight.t())
        return y_NM.view(*x.shape[:-1], weight.shape[0])

    def to_input(self, dy: Tensor) -> Tensor:
        dx_NK = self.products.dgrad(view_as_matrix(dy), self.weight.to(dy.dtype))
        return dx_NK.view(*dy.shape[:-1], self.weight.shape[1])

    def to_weight(self, dy: Tensor, x: Tensor) -> Tensor:
        # Summed over the pieces in float32, rounded once.
        return compute_wgrad_in_dtype(
            view_as_matrix(dy), view_as_matrix(x), torch.float32, self.products
        )


def _passed_on(
    tensor: Tensor, group: GroupCoordinator, where: CallSite | None
) -> tuple[Tensor, list[AsyncWork]]:
    """Begin to send a tensor to the next rank, and to receive the one before's."""
    coming = torch.empty_like(tensor)
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size
    messages = [P2PMessage(tensor, after, True), P2PMessage(coming, before, False)]
    return coming, group.batch_send_recv(messages, where=where)


def _visitors(
    own: Tensor, group: GroupCoordinator, where: CallSite | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield every rank's piece with its number, this rank's first, the next one on its way."""
    held = own.contiguous()
    for turn in range(group.size):
        if turn == group.size - 1:
            yield (group.index + 1) % group.size, held
            return
        coming, pending = _passed_on(held, group, where)
        yield (group.index - turn) % group.size, held
        for each in pending:
            each.wait()
        held = coming


def _piece(whole: Tensor, number: int, group: GroupCoordinator) -> Tensor:
    return whole.chunk(group.size, 1)[number].contiguous()


class _GrowingSum:
    """A sum for each rank's piece, to which all ranks add as it passes by."""

    def __init__(self, group: GroupCoordinator, where: CallSite | None) -> None:
        self.group, self.where = group, where
        self._coming: tuple[Tensor, list[AsyncWork]] | None = None

    def numbers(self) -> Iterator[int]:
        """Yield whose piece to add to next; this rank's own comes last."""
        for turn in range(self.group.size):
            yield (self.group.index - 1 - turn) % self.group.size

    def add(self, part: Tensor, *, last: bool) -> Tensor:
        """Add a part to the sum that has come, and pass it on."""
        if self._coming is not None:
            coming, pending = self._coming
            for each in pending:
                each.wait()
            part = part + coming
        self._coming = None if last else _passed_on(part.contiguous(), self.group, self.where)
        return part


class _GatherProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: GroupCoordinator,
        gemm: GemmBackend,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.gemm, ctx.dtype = group, gemm, get_grad_dtype(weight)
        ctx.where = find_call_site()
        ctx.bias_dtype = None if bias is None else get_grad_dtype(bias)
        job = _Job(weight, gemm)
        batch, length = x.shape[0], x.shape[1] * group.size
        y = x.new_empty(batch, length, weight.shape[0])
        for number, piece in _visitors(x, group, ctx.where):
            y.chunk(group.size, 1)[number].copy_(job.forward(piece, bias))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        group, job = ctx.group, _Job(weight, ctx.gemm)
        total, dx = _GrowingSum(group, ctx.where), dy
        for number in total.numbers():
            part = job.to_input(_piece(dy, number, group))
            dx = total.add(part, last=number == group.index)
        dw: Tensor | None = None
        for number, piece in _visitors(x, group, ctx.where):
            part = job.to_weight(_piece(dy, number, group), piece)
            dw = part if dw is None else dw.add_(part)
        assert dw is not None, "a group has ranks"
        db = None
        if ctx.bias_dtype is not None:
            db = view_as_matrix(dy).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw.to(ctx.dtype), db, None, None


class _ProductScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: GroupCoordinator,
        gemm: GemmBackend,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.gemm, ctx.dtype = group, gemm, get_grad_dtype(weight)
        ctx.where = find_call_site()
        ctx.bias_dtype = None if bias is None else get_grad_dtype(bias)
        total, job, y = _GrowingSum(group, ctx.where), _Job(weight, gemm), x
        for number in total.numbers():
            part = job.forward(_piece(x, number, group), bias)
            y = total.add(part, last=number == group.index)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        group, job = ctx.group, _Job(weight, ctx.gemm)
        dx = torch.empty_like(x)
        dw: Tensor | None = None
        db: Tensor | None = None
        for number, piece in _visitors(dy, group, ctx.where):
            dx.chunk(group.size, 1)[number].copy_(job.to_input(piece))
            part = job.to_weight(piece, _piece(x, number, group))
            dw = part if dw is None else dw.add_(part)
            if ctx.bias_dtype is not None:
                sums = view_as_matrix(piece).sum(0, dtype=torch.float32)
                db = sums if db is None else db.add_(sums)
        assert dw is not None, "a group has ranks"
        return dx, dw.to(ctx.dtype), None if db is None else db.to(ctx.bias_dtype), None, None
