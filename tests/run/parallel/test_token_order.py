"""Which tokens of a sequence a context-parallel rank has."""

import pytest

pytest.importorskip("torch", reason="cuts tensors")

import torch

from meshwright.run.nn.holding import Range
from meshwright.run.parallel.token_order import TokenOrder


def test_a_rank_of_a_ring_has_an_early_and_a_late_run() -> None:
    assert TokenOrder.zigzag(2).pieces == ((0, 3), (1, 2))
    assert TokenOrder.zigzag(2).spans(0, 16) == (Range(0, 4), Range(12, 16))
    assert TokenOrder.zigzag(2).spans(1, 16) == (Range(4, 12),)


def test_ranks_that_trade_heads_share_the_tokens_of_one_place_of_the_ring() -> None:
    assert TokenOrder.zigzag(2, 2).pieces == ((0, 1), (6, 7), (2, 3), (4, 5))
    assert TokenOrder.zigzag(1, 2).pieces == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "order", [TokenOrder.in_a_row(4), TokenOrder.zigzag(4), TokenOrder.zigzag(2, 2)]
)
def test_the_ranks_tokens_joined_are_the_sequence(order: TokenOrder) -> None:
    whole = torch.arange(2 * 16 * 3).view(2, 16, 3)
    behind = torch.cat([order.take(whole, rank) for rank in range(4)], 1)
    assert torch.equal(order.join(behind), whole)
    assert torch.equal(order.part(whole), behind)
