"""Letters: N tokens, k experts per token, X experts, D width."""

import pytest
import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.kernels.moe.token_permutation import (
    MAX_WIDTH,
    TokenPermutation,
    permute,
    permute_reference,
    sort_by_expert,
    unpermute,
    unpermute_reference,
)

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16)


def routes(tokens: int, choices: int, count: int) -> Tensor:
    torch.manual_seed(2)
    scores = torch.rand(tokens, count)
    return scores.topk(choices).indices.to(DEVICE)


def test_sorted_copies_keep_the_order_of_tokens_within_an_expert() -> None:
    experts = routes(40, 3, 7)
    order = sort_by_expert(experts, 7)
    wanted = sorted((expert, token) for token, row in enumerate(experts.tolist()) for expert in row)
    found = torch.empty(120, 2, dtype=torch.int64)
    token_Nk = torch.arange(40)[:, None].expand(40, 3)
    found[order.row_Nk.long().cpu()] = torch.stack([experts.cpu(), token_Nk], -1)
    assert [tuple(each) for each in found.tolist()] == wanted


@pytest.mark.parametrize("count", [5, 256, 257, 600])
def test_ends_are_cumulative_loads_and_empty_experts_end_where_they_begin(count: int) -> None:
    experts = torch.tensor([[0, count - 1], [count - 1, 3]], device=DEVICE)
    ends = sort_by_expert(experts, count).ends_X
    loads = torch.bincount(experts.flatten().cpu(), minlength=count)
    assert ends.dtype == torch.int32
    assert torch.equal(ends.cpu().long(), loads.cumsum(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "choices"), [(16, 2), (24, 1), (40, 5)])
def test_kernels_agree_with_float64(dtype: torch.dtype, width: int, choices: int) -> None:
    order = sort_by_expert(routes(9, choices, 6), 6)
    x = torch.randn(9, width, device=DEVICE).to(dtype)
    y = torch.randn(9 * choices, width, device=DEVICE).to(dtype)
    weights = torch.rand(9, choices, device=DEVICE)
    grad_rows, grad_sum = torch.randn_like(y), torch.randn_like(x)

    def results(x: Tensor, y: Tensor, weights: Tensor, plain: bool) -> list[Tensor]:
        x, y, weights = (each.clone().requires_grad_() for each in (x, y, weights))
        if plain:
            rows, out = permute_reference(x, order), unpermute_reference(y, order, weights)
        else:
            rows = permute(x, order, backend="triton")
            out = unpermute(y, order, weights, backend="triton")
        (dx,) = torch.autograd.grad(rows, x, grad_rows.to(rows.dtype))
        dy, dw = torch.autograd.grad(out, (y, weights), grad_sum.to(out.dtype))
        return [rows.detach(), out.detach(), dx, dy, dw]

    found = results(x, y, weights, plain=False)
    wanted = results(x.double(), y.double(), weights.double(), plain=True)
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            ours.double(), exact, rtol=torch.finfo(ours.dtype).eps, atol=4e-6
        )


def test_plain_versions_differentiate_as_finite_differences_do() -> None:
    order = sort_by_expert(routes(3, 2, 4), 4)
    leaves = [
        torch.randn(*shape, dtype=torch.float64, device=DEVICE, requires_grad=True)
        for shape in ((3, 5), (6, 5), (3, 2))
    ]
    x, y, weights = leaves
    assert torch.autograd.gradcheck(lambda x: permute_reference(x, order), x)
    assert torch.autograd.gradcheck(lambda y, w: unpermute_reference(y, order, w), (y, weights))


def test_combining_what_was_dispatched_gives_the_tokens_back() -> None:
    order = sort_by_expert(routes(11, 4, 9), 9)
    x = torch.randn(11, 8, device=DEVICE)
    weights = torch.full((11, 4), 0.25, device=DEVICE)
    back = unpermute(permute(x, order, backend="triton"), order, weights, backend="triton")
    torch.testing.assert_close(back, x)


def test_no_tokens_are_no_trouble() -> None:
    order = sort_by_expert(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)
    x = torch.empty(0, 8, device=DEVICE)
    rows = permute(x, order, backend="triton")
    assert rows.shape == (0, 8)
    assert unpermute(rows, order, torch.empty(0, 2, device=DEVICE), backend="triton").shape == (
        0,
        8,
    )
    assert order.ends_X.tolist() == [0, 0, 0]


def test_rows_that_do_not_fit_are_named() -> None:
    order = sort_by_expert(routes(4, 2, 3), 3)
    with pytest.raises(InputError, match="an order of 4 tokens"):
        permute(torch.zeros(5, 8, device=DEVICE), order)
    with pytest.raises(InputError, match=f"at most {MAX_WIDTH}"):
        permute(torch.zeros(4, MAX_WIDTH + 1, device=DEVICE), order, backend="triton")


def test_an_order_is_made_of_plain_tensors() -> None:
    order = sort_by_expert(routes(4, 2, 3), 3)
    assert isinstance(order, TokenPermutation)
    assert order.row_Nk.shape == (4, 2)
    assert order.row_Nk.flatten().sort().values.tolist() == list(range(8))
