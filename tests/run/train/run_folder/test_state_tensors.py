"""The state of a run says of every tensor where it belongs, or that it cannot."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="states are torch tensors")

import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.nn.sharding.sharded_tensor import BlockScales, ShardedTensor
from meshwright.run.parallel.zero.bucket_shard import ShardRange
from meshwright.run.parallel.zero.gradient_sync import Sync
from meshwright.run.train.optimizer import OptimizerConfig, make_optimizer
from meshwright.run.train.run_folder.state_tensors import StateTensor, make_sharded_state
from meshwright.spec.layout import Layout

EIGHT_BITS = Layout(master_precision="none", moment_precision="int8")


class OneParameter:
    """What a rank has that holds a part of a single parameter."""

    def __init__(self, holding: ShardSpec) -> None:
        self.holding = holding
        self.weight = nn.Parameter(torch.zeros(holding.shape, dtype=torch.bfloat16))

    def shard_ranges(self) -> dict[str, ShardRange]:
        return {"w": ShardRange(self.holding, 0, self.weight.numel())}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "w", self.weight


def state(holding: ShardSpec) -> dict[str, StateTensor]:
    sync = OneParameter(holding)
    given: Any = sync.named_parameters()
    optimizer = make_optimizer(given, EIGHT_BITS, OptimizerConfig(), total_steps=1)
    return make_sharded_state(cast(Sync, sync), optimizer)


def shared_keys(width: int) -> ShardSpec:
    """Return queries of one rank, and keys and values that its neighbour holds too."""
    rows = (IndexRange(0, 8), IndexRange(32, 40), IndexRange(48, 56))
    return ShardSpec(
        (64, width),
        (rows, (IndexRange(0, width),)),
        kv_replicas=2,
        kv_replica_rows=IndexRange(8, 24),
    )


def test_scales_know_their_codes_and_codes_their_place() -> None:
    found = state(shared_keys(32))
    scales = found["optimizer.second_scale.w"]
    assert isinstance(scales, BlockScales)
    assert scales.codes_name == "optimizer.second.w"
    assert isinstance(found[scales.codes_name], ShardedTensor)
    assert isinstance(found["model.w"], ShardedTensor)


def test_a_block_that_ranks_share_in_part_is_refused() -> None:
    with pytest.raises(InputError, match="begin within a block of 256"):
        state(shared_keys(24))
