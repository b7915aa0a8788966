"""Which row goes where on the way to experts that several ranks hold, and the moves themselves.

Rows arrive as runs: for each rank of the experts' tensor-parallel group, for each source, for each
expert held here, so many rows. `RowPermutation` brings them into the order of experts, and within
an expert of source rank and token; `CapacitySlots` gives every expert the same number of rows from
every source, which drops the rest. All indices are made on the device, and those that follow from
the layout alone once.

Letters: N tokens, k experts per token, X experts, S slots, P rows that arrived, D width.
"""

# Autograd's own functions are untyped. Shape suffixes name fields.
# mypy: allow-untyped-calls
# ruff: noqa: N815

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.moe.moe_layer import TokenRouting


class RowPermutation(NamedTuple):
    """A permutation of the rows that arrived; those that only fill up come last."""

    target_P: Tensor
    """int64: the sorted place of each row."""
    source_P: Tensor
    """int64: the row at each sorted place."""
    ends_X: Tensor
    """int32: the sorted place after the last row of each expert held here."""

    def sort(self, rows_PD: Tensor) -> Tensor:
        """Bring rows into the order of experts."""
        return _moved(rows_PD, self.source_P, self.target_P)

    def restore(self, rows_PD: Tensor) -> Tensor:
        """Bring rows back into the order they came in."""
        return _moved(rows_PD, self.target_P, self.source_P)


def make_row_permutation(counts: Tensor, order: Sequence[int], length: int) -> RowPermutation:
    """Return the way from runs of rows to the order of experts.

    `counts` has the runs' lengths by (rank, source, expert); `order` lists the pairs of the first
    two, by their number rank · sources + source, as rows of an expert shall follow each other; each
    rank's rows are filled up to `length`.
    """
    ranks, total, device = len(counts), len(counts) * length, counts.device
    wide = counts.long().view(ranks, -1)
    filling = length - wide.sum(1, keepdim=True)
    runs = torch.cat([wide, filling], 1).view(-1)
    line = _line(tuple(order), counts.shape, device)
    before = torch.empty_like(runs)
    before[line] = _starts(runs[line])
    shift = torch.repeat_interleave(before - _starts(runs), runs, output_size=total)
    places = torch.arange(total, device=device)
    target = places + shift
    ends = counts.sum((0, 1)).cumsum(0).to(torch.int32)
    return RowPermutation(target, torch.empty_like(places).scatter_(0, target, places), ends)


@lru_cache(maxsize=64)
def get_cached_indices(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers on a device; the host waits for it the first time, and never again."""
    return torch.tensor(numbers, device=device)


@lru_cache(maxsize=64)
def _line(order: tuple[int, ...], shape: torch.Size, device: torch.device) -> Tensor:
    """Return the runs by (rank, source, expert or filling) as they shall follow each other."""
    ranks, sources, experts = shape
    each = sources * experts + 1
    starts = [pair // sources * each + pair % sources * experts for pair in order]
    inner = [start + expert for expert in range(experts) for start in starts]
    last = [rank * each - 1 for rank in range(1, ranks + 1)]
    return torch.tensor([*inner, *last], device=device)


class CapacitySlots(NamedTuple):
    """Places of equal number for every expert; copies of tokens that find none are dropped."""

    slot_Nk: Tensor
    """int64: where each copy goes; one past the last slot for those that are dropped."""
    copy_S: Tensor
    """int64: the copy in each slot, by its number n · k + j; N · k where it is empty."""

    def gather_tokens(self, x_ND: Tensor) -> Tensor:
        """Return the rows of all slots, noughts in empty ones."""
        tokens = self.copy_S // self.slot_Nk.shape[1]
        filled: Tensor = _Picked.apply(x_ND, tokens, self.slot_Nk)
        return filled

    def combine_outputs(self, y_SD: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return for each token the weighted sum of its copies, noughts for dropped ones."""
        chosen: Tensor = _Picked.apply(y_SD, self.slot_Nk.view(-1), self.copy_S[:, None])
        precise = torch.promote_types(y_SD.dtype, torch.float32)
        copies_NkD = chosen.view(*weights_Nk.shape, -1).to(precise)
        return (copies_NkD * weights_Nk.to(precise)[..., None]).sum(1).to(y_SD.dtype)


def assign_capacity_slots(visits: TokenRouting, each: int) -> CapacitySlots:
    """Give each expert room for so many tokens; the first ones get it."""
    experts_Nk, (row_Nk, ends_X) = visits.routes.experts_Nk, visits.permutation
    starts_X = ends_X - visits.tokens_per_expert_X
    place_Nk = row_Nk - starts_X[experts_Nk]
    most = each * len(ends_X)
    slot_Nk = torch.where(place_Nk < each, experts_Nk * each + place_Nk, most)
    copies = torch.arange(slot_Nk.numel(), device=slot_Nk.device)
    empty = torch.full((most + 1,), slot_Nk.numel(), device=slot_Nk.device)
    return CapacitySlots(slot_Nk, empty.scatter_(0, slot_Nk.view(-1), copies)[:most])


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _moved(rows: Tensor, source: Tensor, target: Tensor) -> Tensor:
    moved: Tensor = _Moved.apply(rows, source, target)
    return moved


class _Moved(torch.autograd.Function):
    """Rows in another order; unlike torch's own, backward adds nothing up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Picked(torch.autograd.Function):
    """Rows by number, noughts for the number after the last; `uses` says where each row went."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, numbers: Tensor, uses: Tensor) -> Tensor:
        ctx.save_for_backward(uses)
        return _with_nought(rows).index_select(0, numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (uses,) = ctx.saved_tensors
        return _with_nought(grads[0])[uses].sum(1), None, None


def _with_nought(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
