"""Letters: N tokens, k experts per token, X experts, S slots, D width."""

import pytest

pytest.importorskip("torch", reason="moves rows of tensors")

import torch
from torch import Tensor

from meshwright.run.kernels.moe.token_permutation import sort_by_expert
from meshwright.run.nn.moe.moe_layer import TokenRouting
from meshwright.run.nn.moe.router import TopKRoutes
from meshwright.run.parallel.expert_parallel.row_permutation import (
    assign_capacity_slots,
    make_row_permutation,
)

COUNTS = torch.tensor([[[2, 0, 1], [1, 1, 0]], [[0, 3, 1], [1, 0, 2]]])
"""Rows by rank (2), source (2) and expert (3)."""
LENGTH = 8
"""One rank got five rows, the other seven."""


def arrived() -> tuple[Tensor, list[tuple[int, int, int, int]]]:
    """Return rows as they arrive, and each one's rank, source, expert and number (-1: none)."""
    names = []
    for rank in range(2):
        real = [
            (rank, source, expert, number)
            for source in range(2)
            for expert in range(3)
            for number in range(int(COUNTS[rank, source, expert]))
        ]
        names += real + [(-1, -1, -1, -1)] * (LENGTH - len(real))
    return torch.arange(len(names), dtype=torch.float32)[:, None], names


def test_rows_are_sorted_by_expert_then_by_source_then_by_token() -> None:
    rows, names = arrived()
    # Sources one behind the other over both ranks: pairs (0, 0), (1, 0), (0, 1), (1, 1).
    moves = make_row_permutation(COUNTS, [0, 2, 1, 3], LENGTH)
    order = [names[int(number)] for number in moves.sort(rows)[:, 0]]
    real = [name for name in order if name[0] >= 0]
    wanted = sorted(real, key=lambda name: (name[2], name[1], name[0], name[3]))
    assert order[: len(real)] == real == wanted
    assert moves.ends_X.tolist() == [4, 8, 12]


def test_sorted_rows_find_back_and_so_do_their_gradients() -> None:
    rows, _ = arrived()
    moves = make_row_permutation(COUNTS, [0, 1, 2, 3], LENGTH)
    rows.requires_grad_()
    back = moves.restore(moves.sort(rows))
    assert torch.equal(back, rows)
    slope = torch.randn_like(rows)
    (found,) = torch.autograd.grad(back, rows, slope)
    assert torch.equal(found, slope)


EXPERTS_NK = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1]])
"""Expert 0 is visited by all four tokens, 1 by three, 2 by one."""


def visits() -> TokenRouting:
    order = sort_by_expert(EXPERTS_NK, 3)
    load = torch.diff(order.ends_X, prepend=order.ends_X.new_zeros(1))
    return TokenRouting(TopKRoutes(EXPERTS_NK, torch.ones(4, 2), torch.ones(4, 3)), order, load)


def test_an_expert_takes_the_first_tokens_it_has_room_for() -> None:
    x_ND = torch.arange(1.0, 5.0)[:, None]
    filled = assign_capacity_slots(visits(), 2).gather_tokens(x_ND)
    assert filled[:, 0].tolist() == [1, 2, 1, 3, 2, 0]


def test_dropped_copies_add_nothing_and_get_no_gradient() -> None:
    x_ND = torch.arange(1.0, 5.0)[:, None].requires_grad_()
    weights_Nk = torch.rand(4, 2, requires_grad=True)
    places = assign_capacity_slots(visits(), 2)
    out_ND = places.combine_outputs(10 * places.gather_tokens(x_ND), weights_Nk)
    kept = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    wanted = (10 * weights_Nk * kept).sum(1, keepdim=True) * x_ND
    assert torch.allclose(out_ND, wanted)
    found = torch.autograd.grad(out_ND.sum(), (x_ND, weights_Nk))
    expected = torch.autograd.grad(wanted.sum(), (x_ND, weights_Nk))
    assert all(map(torch.allclose, found, expected))
