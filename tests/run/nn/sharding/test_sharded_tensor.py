"""A tensor in terms of the whole it is part of: every number at its place, and once."""

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="places tensors")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.nn.sharding.sharded_tensor import BlockScales, ShardChunk, ShardedTensor


@st.composite
def holdings(draw: st.DrawFn) -> ShardSpec:
    """Draw up to four axes of which some ranges each are held, in any order, some of them empty."""
    whole, parts = [], []
    for _ in range(draw(st.integers(0, 4))):
        ends = sorted(draw(st.lists(st.integers(0, 5), min_size=2, max_size=6)))
        ranges = [IndexRange(*pair) for pair in zip(ends[::2], ends[1::2], strict=False)]
        parts.append(tuple(draw(st.permutations(ranges))))
        whole.append(ends[-1] + draw(st.integers(0, 2)))
    return ShardSpec(tuple(whole), tuple(parts))


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)


def put(placed: ShardedTensor) -> Tensor:
    """Return a whole with the tensor's parts at their places and nought elsewhere."""
    whole = torch.zeros(placed.global_shape, dtype=placed.tensor.dtype)
    for part in placed.chunks:
        box = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))
        assert not whole[box].any(), "no number is in two parts"
        whole[box] = placed.view_chunk(part)
    return whole


def marked(holding: ShardSpec, start: int, stop: int) -> Tensor:
    """Return the numbers of a whole that belong to an interval, by brute force."""
    whole = numbered(holding.global_shape)
    chosen = holding.select_local(whole).reshape(-1)[start:stop]
    return torch.where(torch.isin(whole, chosen), whole, 0)


@given(holdings())
def test_what_is_held_lies_at_its_place(holding: ShardSpec) -> None:
    placed = ShardedTensor.from_spec(holding.select_local(numbered(holding.global_shape)), holding)
    assert torch.equal(put(placed), marked(holding, 0, placed.tensor.numel()))


@given(holdings(), st.data())
def test_any_interval_of_what_is_held_lies_at_its_place(
    holding: ShardSpec, data: st.DataObject
) -> None:
    row = holding.select_local(numbered(holding.global_shape)).reshape(-1)
    start = data.draw(st.integers(0, row.numel()))
    stop = data.draw(st.integers(start, row.numel()))
    placed = ShardedTensor.from_flat_range(row[start:stop], holding, start, stop)
    assert torch.equal(put(placed), marked(holding, start, stop))
    assert all(part.sizes and 0 not in part.sizes for part in placed.chunks if holding.global_shape)


def test_an_interval_of_rows_is_a_rest_whole_rows_and_a_beginning() -> None:
    holding = ShardSpec((9, 4), ((IndexRange(2, 8),), (IndexRange(0, 4),)))
    placed = ShardedTensor.from_flat_range(torch.zeros(15), holding, 2, 17)
    assert [(part.offsets, part.sizes) for part in placed.chunks] == [
        ((2, 2), (1, 2)),
        ((3, 0), (3, 4)),
        ((6, 0), (1, 1)),
    ]


def test_what_is_written_to_a_part_is_in_the_tensor() -> None:
    row = torch.zeros(6)
    placed = ShardedTensor.from_flat_range(row, ShardSpec.unsharded((4, 2)), 1, 7)
    for number, part in enumerate(placed.chunks):
        placed.view_chunk(part).fill_(number)
    assert row.tolist() == [0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_whole_tensor_is_one_part(shape: tuple[int, ...]) -> None:
    placed = ShardedTensor.unsharded(numbered(shape))
    assert torch.equal(put(placed), numbered(shape))


def test_tensors_of_another_size_are_refused() -> None:
    holding = ShardSpec((4, 2), ((IndexRange(1, 3),), (IndexRange(0, 2),)))
    with pytest.raises(ValueError, match=r"\(2, 2\) is held"):
        ShardedTensor.from_spec(torch.zeros(4, 2), holding)
    with pytest.raises(ValueError, match="not one row of 3"):
        ShardedTensor.from_flat_range(torch.zeros(4), holding, 0, 3)
    with pytest.raises(ValueError, match="outside of the 4 elements"):
        ShardedTensor.from_flat_range(torch.zeros(3), holding, 2, 5)
    with pytest.raises(ValueError, match="is outside"):
        ShardedTensor(torch.zeros(2), (3,), (ShardChunk((2,), (2,), (slice(0, 2),)),))


class TestBlockScales:
    HALF = ShardSpec((8, 4), ((IndexRange(0, 4),), (IndexRange(0, 4),)))

    def mark(self, holding: ShardSpec, start: int = 0, stop: int | None = None) -> str:
        return BlockScales.from_spec(torch.zeros(1), "codes", holding, start, stop).layout_key

    def test_a_whole_parameter_has_no_mark(self) -> None:
        assert self.mark(ShardSpec.unsharded((8, 4))) == ""
        split = ShardSpec((8, 4), ((IndexRange(0, 3), IndexRange(3, 8)), (IndexRange(0, 4),)))
        assert self.mark(split, 0, 32) == ""

    def test_the_same_elements_in_the_same_order_have_the_same_mark(self) -> None:
        assert self.mark(self.HALF) == self.mark(replace(self.HALF, is_expert=True), 0, 16)
        assert self.mark(self.HALF) == self.mark(ShardSpec.unsharded((8, 4)), 0, 16)

    def test_other_elements_or_another_order_have_another_mark(self) -> None:
        turned = ShardSpec((8, 4), ((IndexRange(2, 4), IndexRange(0, 2)), (IndexRange(0, 4),)))
        marks = [
            self.mark(self.HALF),
            self.mark(turned),
            self.mark(self.HALF, 0, 8),
            self.mark(self.HALF, 8, 16),
            self.mark(ShardSpec((8, 4), ((IndexRange(4, 8),), (IndexRange(0, 4),)))),
        ]
        assert len(set(marks)) == len(marks)
