"""Tests that hold layouts against one device find what is wrong, lacking or no number."""

import pytest

pytest.importorskip("torch", reason="compares tensors")

import torch
from torch import Tensor

from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.parallel.zero.bucket_shard import ShardRange
from tests.run.parallel.nearness import TOLERANCES, Compared, Measured, differences, faults, held

WANTED = {"a": torch.arange(1.0, 9.0).view(4, 2), "b": torch.ones(3), "c": torch.zeros(2)}


def part(name: str, rank: int) -> ShardRange:
    """Return a rank's half of a tensor along its first axis; all of what is small."""
    whole = tuple(WANTED[name].shape)
    if name != "a":
        return ShardRange(ShardSpec.unsharded(whole), 0, WANTED[name].numel())
    holding = ShardSpec(whole, ((IndexRange(2 * rank, 2 * rank + 2),), (IndexRange(0, 2),)))
    return ShardRange(holding, 0, 4)


def rank_with(rank: int, **changes: Tensor | None) -> Measured:
    """Return what a rank measures that has all it should but for some changes."""
    parts = {}
    for name, whole in WANTED.items():
        lie = part(name, rank)
        parts[name] = Compared(changes.get(name, lie.shard_spec.select_local(whole)), lie)
    return Measured([*differences("gradient", parts, WANTED)], {"gradient": held(parts)})


def said(*ranks: Measured) -> list[str]:
    return list(faults(ranks, {"gradient": WANTED}, TOLERANCES))


def test_what_is_equal_passes() -> None:
    assert said(rank_with(0), rank_with(1)) == []


def test_a_wrong_number_is_found_where_it_is() -> None:
    near, far = WANTED["a"][2:] * (1 + 1e-6), WANTED["a"][2:] * (1 + 1e-4)
    assert said(rank_with(0), rank_with(1, a=near)) == []
    (line,) = said(rank_with(0), rank_with(1, a=far))
    assert line.startswith("rank 1: gradient of a is off by 1")


def test_a_gradient_that_a_rank_lacks_is_a_fault_even_where_another_has_it() -> None:
    assert said(rank_with(0, b=None), rank_with(1)) == ["rank 0: gradient of b is off by inf"]


def test_what_no_rank_has_is_a_fault() -> None:
    assert said(rank_with(0)) == ["gradient of a: no rank has 4 of 8 elements"]


def test_what_is_no_number_is_a_fault() -> None:
    wrong = torch.full((2, 2), torch.nan)
    assert said(rank_with(0, a=wrong), rank_with(1)) == ["rank 0: gradient of a is off by nan"]


def test_what_is_nought_on_one_device_is_measured_by_the_average() -> None:
    rounding, real = torch.full((2,), 1e-8), torch.full((2,), 1e-5)
    assert said(rank_with(0, c=rounding), rank_with(1)) == []
    assert len(said(rank_with(0, c=real), rank_with(1))) == 1


def test_steps_of_the_weights_themselves_are_taken_off_moves() -> None:
    moved, weights = {"b": torch.full((3,), 1e-4)}, {"b": torch.ones(3)}
    lie = part("b", 0)
    for off, passes in ((1e-7, True), (1e-6, False)):
        parts = {"b": Compared(moved["b"] + off, lie)}
        (error,) = differences("update", parts, moved, weights)
        assert (error.error <= TOLERANCES["update"]) == passes
