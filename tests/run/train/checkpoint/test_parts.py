"""Tensors that are parts of a whole: saved one way, loaded another, and what is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.kernels.block_codes import plain_decode, plain_encode, plain_scales
from meshwright.run.nn.holding import Holding, Range
from meshwright.run.nn.placed import BlockScales, Part, Placed
from meshwright.run.train.checkpoint import Checkpoints, fetch, plan
from meshwright.run.train.checkpoint import given as given_tensors

WHOLE = torch.arange(60.0).reshape(5, 4, 3)
COLUMNS = Holding((5, 4, 3), ((Range(0, 5),), (Range(3, 4), Range(1, 2)), (Range(0, 3),)))


def rows(first: int, last: int) -> Placed:
    part = Part((first, 0, 0), (last - first, 4, 3), (slice(0, last - first),))
    return Placed(WHOLE[first:last].clone(), (5, 4, 3), (part,))


def both(placed: Placed, other: Placed) -> Placed:
    """Return two tensors of one whole as one, one behind the other."""
    parts = [
        Part(part.offsets, part.sizes, (slice(at, at + part.sizes[0]),))
        for each, at in ((placed, 0), (other, len(placed.tensor)))
        for part in each.parts
    ]
    return Placed(torch.cat([placed.tensor, other.tensor]), placed.whole, tuple(parts))


def test_parts_are_saved_as_the_whole(tmp_path: Path) -> None:
    into = torch.zeros(5, 4, 3)
    with Checkpoints(tmp_path) as checkpoints:
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
        Checkpoints(tmp_path_factory.mktemp("parts")) as checkpoints,
    ):
        patch.setattr(fetch, "_READ_BYTES", buffer_bytes)
        checkpoints.save(1, {"w": WHOLE}, {})
        into = Placed.of_interval(row, COLUMNS, start, stop)
        checkpoints.load({"w": into}, leftover="leave")
        held = torch.zeros(COLUMNS.shape)
        checkpoints.load({"w": Placed.of(held, COLUMNS)}, leftover="leave")
    assert torch.equal(row, COLUMNS.take(WHOLE).reshape(-1)[start:stop])
    assert torch.equal(held, COLUMNS.take(WHOLE))


def test_a_tensor_with_a_part_that_nobody_holds_is_not_saved(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": WHOLE}, {})
        with pytest.raises(InputError, match="w: 36 of its 60 elements are held"):
            checkpoints.save(2, {"w": rows(0, 3)}, {})
        with pytest.raises(InputError, match="w: 24 of its 60 elements are asked for"):
            checkpoints.load({"w": rows(3, 5)})
        assert [found.step for found in checkpoints.list()] == [1]
        checkpoints.load({"w": rows(3, 5)}, leftover="leave")


class TestBlockScales:
    """Scales of 8-bit moments, with the codes they are for."""

    WHOLE = Holding.all_of((8, 96))
    TURNED = Holding((8, 96), ((Range(0, 8),), (Range(48, 96), Range(0, 48))))
    """The same elements in another order."""

    def coded(self, holding: Holding, *, filled: bool) -> dict[str, Placed | BlockScales]:
        """Return a second moment as a rank has it: codes and scales, or zeros."""
        made = torch.Generator().manual_seed(3)
        values = holding.take(torch.randn(holding.whole, generator=made).square()).contiguous()
        scales = plain_scales(values)
        half = torch.full_like(values, 1 << 23, dtype=torch.int64)
        codes = plain_encode(values, scales, half, torch.uint8)
        if not filled:
            codes, scales = torch.zeros_like(codes), torch.zeros_like(scales)
        return {
            "second": Placed.of(codes, holding),
            "scale": BlockScales.of(scales, "second", holding),
        }

    def in_order(self, holding: Holding, state: dict[str, Placed | BlockScales]) -> torch.Tensor:
        """Return what the codes stand for, in the order of the whole."""
        values = plain_decode(state["second"].tensor, state["scale"].tensor)
        return values if holding is self.WHOLE else torch.cat((values[:, 48:], values[:, :48]), 1)

    @pytest.mark.parametrize("holding", [WHOLE, TURNED])
    def test_they_come_back_under_the_same_layout(self, tmp_path: Path, holding: Holding) -> None:
        saved, into = self.coded(holding, filled=True), self.coded(holding, filled=False)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, saved, {})
            checkpoints.load(into)
        assert all(torch.equal(into[name].tensor, saved[name].tensor) for name in saved)

    @pytest.mark.parametrize(("first", "then"), [(WHOLE, TURNED), (TURNED, WHOLE)])
    def test_under_another_layout_codes_are_made_anew(
        self, tmp_path: Path, first: Holding, then: Holding
    ) -> None:
        saved, into = self.coded(first, filled=True), self.coded(then, filled=False)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, saved, {})
            checkpoints.load(into)
        before, after = self.in_order(first, saved), self.in_order(then, into)
        assert not torch.equal(before, after)
        assert bool(((after - before).abs() <= 1.0001 / 16 * before).all())

    def test_a_save_that_does_not_say_what_shares_a_scale_is_refused_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan, "to_save", given_tensors.placed_all)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, self.coded(self.TURNED, filled=True), {})
            checkpoints.load(self.coded(self.TURNED, filled=False))
            with pytest.raises(InputError, match="8-bit moments") as raised:
                checkpoints.load(self.coded(self.WHOLE, filled=False))
        assert len(raised.value.problems) == 1
