"""The state of a run says of every tensor where it belongs, or that it cannot."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="states are torch tensors")

import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.run.nn.holding import Holding, Range
from meshwright.run.nn.placed import BlockScales, Placed
from meshwright.run.parallel.shards import Lie
from meshwright.run.parallel.sync import Sync
from meshwright.run.train.optimizer import OptimizerSettings, make_optimizer
from meshwright.run.train.placed_state import State, placed_state
from meshwright.spec.layout import Layout

EIGHT_BITS = Layout(master_precision="none", moment_precision="int8")


class OneParameter:
    """What a rank has that holds a part of a single parameter."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.weight = nn.Parameter(torch.zeros(holding.shape, dtype=torch.bfloat16))

    def lies(self) -> dict[str, Lie]:
        return {"w": Lie(self.holding, 0, self.weight.numel())}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "w", self.weight


def state(holding: Holding) -> dict[str, State]:
    sync = OneParameter(holding)
    given: Any = sync.named_parameters()
    optimizer = make_optimizer(given, EIGHT_BITS, OptimizerSettings(), total_steps=1)
    return placed_state(cast(Sync, sync), optimizer)


def shared_keys(width: int) -> Holding:
    """Return queries of one rank, and keys and values that its neighbour holds too."""
    rows = (Range(0, 8), Range(32, 40), Range(48, 56))
    return Holding((64, width), (rows, (Range(0, width),)), twins=2, twin_rows=Range(8, 24))


def test_scales_know_their_codes_and_codes_their_place() -> None:
    found = state(shared_keys(32))
    scales = found["optimizer.second_scale.w"]
    assert isinstance(scales, BlockScales)
    assert scales.codes == "optimizer.second.w"
    assert isinstance(found[scales.codes], Placed)
    assert isinstance(found["model.w"], Placed)


def test_a_block_that_ranks_share_in_part_is_refused() -> None:
    with pytest.raises(InputError, match="begin within a block of 256"):
        state(shared_keys(24))
