"""Which tokens of a sequence a context-parallel rank has."""

import pytest

pytest.importorskip("torch", reason="cuts tensors")

import torch

from meshwright.run.nn.sharding.shard_spec import IndexRange
from meshwright.run.parallel.context_parallel.token_partition import TokenPartition


def test_a_rank_of_a_ring_has_an_early_and_a_late_run() -> None:
    assert TokenPartition.zigzag(2).pieces == ((0, 3), (1, 2))
    assert TokenPartition.zigzag(2).get_rank_spans(0, 16) == (IndexRange(0, 4), IndexRange(12, 16))
    assert TokenPartition.zigzag(2).get_rank_spans(1, 16) == (IndexRange(4, 12),)


def test_ranks_that_trade_heads_share_the_tokens_of_one_place_of_the_ring() -> None:
    assert TokenPartition.zigzag(2, 2).pieces == ((0, 1), (6, 7), (2, 3), (4, 5))
    assert TokenPartition.zigzag(1, 2).pieces == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "order", [TokenPartition.contiguous(4), TokenPartition.zigzag(4), TokenPartition.zigzag(2, 2)]
)
def test_the_ranks_tokens_joined_are_the_sequence(order: TokenPartition) -> None:
    whole = torch.arange(2 * 16 * 3).view(2, 16, 3)
    behind = torch.cat([order.select_local_tokens(whole, rank) for rank in range(4)], 1)
    assert torch.equal(order.to_full_sequence(behind), whole)
    assert torch.equal(order.to_rank_order(whole), behind)
