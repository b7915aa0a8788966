"""Tensors that are parts of a whole: saved one way, loaded another, and what is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.kernels.optimizer.block_quantization import (
    block_scales_reference,
    dequantize_blocks,
    quantize_blocks,
)
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.nn.sharding.sharded_tensor import BlockScales, ShardChunk, ShardedTensor
from meshwright.run.train.checkpoint import (
    CheckpointManager,
    read_items,
    savable_tensors,
    save_plan,
)

WHOLE = torch.arange(60.0).reshape(5, 4, 3)
COLUMNS = ShardSpec(
    (5, 4, 3), ((IndexRange(0, 5),), (IndexRange(3, 4), IndexRange(1, 2)), (IndexRange(0, 3),))
)


def rows(first: int, last: int) -> ShardedTensor:
    part = ShardChunk((first, 0, 0), (last - first, 4, 3), (slice(0, last - first),))
    return ShardedTensor(WHOLE[first:last].clone(), (5, 4, 3), (part,))


def both(placed: ShardedTensor, other: ShardedTensor) -> ShardedTensor:
    """Return two tensors of one whole as one, one behind the other."""
    parts = [
        ShardChunk(part.offsets, part.sizes, (slice(at, at + part.sizes[0]),))
        for each, at in ((placed, 0), (other, len(placed.tensor)))
        for part in each.chunks
    ]
    return ShardedTensor(
        torch.cat([placed.tensor, other.tensor]), placed.global_shape, tuple(parts)
    )


def test_parts_are_saved_as_the_whole(tmp_path: Path) -> None:
    into = torch.zeros(5, 4, 3)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": both(rows(3, 5), rows(0, 3))}, {})
        checkpoints.load({"w": into})
    assert torch.equal(into, WHOLE)


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([1, 40, 16 * 2**20]))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_part_is_read_from_a_whole(
    tmp_path_factory: pytest.TempPathFactory, one: int, other: int, buffer_bytes: int
) -> None:
    start, stop = sorted((one, other))
    row = torch.zeros(stop - start)
    with (
        pytest.MonkeyPatch.context() as patch,
        CheckpointManager(tmp_path_factory.mktemp("parts")) as checkpoints,
    ):
        patch.setattr(read_items, "_READ_BYTES", buffer_bytes)
        checkpoints.save(1, {"w": WHOLE}, {})
        into = ShardedTensor.from_flat_range(row, COLUMNS, start, stop)
        checkpoints.load({"w": into}, leftover="ignore")
        held = torch.zeros(COLUMNS.shape)
        checkpoints.load({"w": ShardedTensor.from_spec(held, COLUMNS)}, leftover="ignore")
    assert torch.equal(row, COLUMNS.select_local(WHOLE).reshape(-1)[start:stop])
    assert torch.equal(held, COLUMNS.select_local(WHOLE))


def test_a_tensor_with_a_part_that_nobody_holds_is_not_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": WHOLE}, {})
        with pytest.raises(InputError, match="w: 36 of its 60 elements are held"):
            checkpoints.save(2, {"w": rows(0, 3)}, {})
        with pytest.raises(InputError, match="w: 24 of its 60 elements are asked for"):
            checkpoints.load({"w": rows(3, 5)})
        assert [found.step for found in checkpoints.list_saved()] == [1]
        checkpoints.load({"w": rows(3, 5)}, leftover="ignore")


class TestBlockScales:
    """Scales of 8-bit moments, with the codes they are for."""

    WHOLE = ShardSpec.unsharded((8, 96))
    TURNED = ShardSpec((8, 96), ((IndexRange(0, 8),), (IndexRange(48, 96), IndexRange(0, 48))))
    """The same elements in another order."""

    def coded(self, holding: ShardSpec, *, filled: bool) -> dict[str, ShardedTensor | BlockScales]:
        """Return a second moment as a rank has it: codes and scales, or zeros."""
        made = torch.Generator().manual_seed(3)
        values = holding.select_local(
            torch.randn(holding.global_shape, generator=made).square()
        ).contiguous()
        scales = block_scales_reference(values)
        half = torch.full_like(values, 1 << 23, dtype=torch.int64)
        codes = quantize_blocks(values, scales, half, torch.uint8)
        if not filled:
            codes, scales = torch.zeros_like(codes), torch.zeros_like(scales)
        return {
            "second": ShardedTensor.from_spec(codes, holding),
            "scale": BlockScales.from_spec(scales, "second", holding),
        }

    def in_order(
        self, holding: ShardSpec, state: dict[str, ShardedTensor | BlockScales]
    ) -> torch.Tensor:
        """Return what the codes stand for, in the order of the whole."""
        values = dequantize_blocks(state["second"].tensor, state["scale"].tensor)
        return values if holding is self.WHOLE else torch.cat((values[:, 48:], values[:, :48]), 1)

    @pytest.mark.parametrize("holding", [WHOLE, TURNED])
    def test_they_come_back_under_the_same_layout(self, tmp_path: Path, holding: ShardSpec) -> None:
        saved, into = self.coded(holding, filled=True), self.coded(holding, filled=False)
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, saved, {})
            checkpoints.load(into)
        assert all(torch.equal(into[name].tensor, saved[name].tensor) for name in saved)

    @pytest.mark.parametrize(("first", "then"), [(WHOLE, TURNED), (TURNED, WHOLE)])
    def test_under_another_layout_codes_are_made_anew(
        self, tmp_path: Path, first: ShardSpec, then: ShardSpec
    ) -> None:
        saved, into = self.coded(first, filled=True), self.coded(then, filled=False)
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, saved, {})
            checkpoints.load(into)
        before, after = self.in_order(first, saved), self.in_order(then, into)
        assert not torch.equal(before, after)
        assert bool(((after - before).abs() <= 1.0001 / 16 * before).all())

    def test_a_save_that_does_not_say_what_shares_a_scale_is_refused_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            save_plan, "add_scale_layout_tensors", savable_tensors.convert_to_sharded_tensors
        )
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, self.coded(self.TURNED, filled=True), {})
            checkpoints.load(self.coded(self.TURNED, filled=False))
            with pytest.raises(InputError, match="8-bit moments") as raised:
                checkpoints.load(self.coded(self.WHOLE, filled=False))
        assert len(raised.value.problems) == 1
