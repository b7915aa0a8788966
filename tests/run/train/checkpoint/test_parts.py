"""Tensors that are parts of a whole: saved one way, loaded another, and what is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.nn.holding import Holding, Range
from meshwright.run.nn.placed import Fixed, Part, Placed
from meshwright.run.train.checkpoint import Checkpoints, CheckpointSettings, fetch

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


class TestFixed:
    """Scales of 8-bit moments."""

    HALVES = tuple(Holding((8,), ((Range(*ends),),)) for ends in ((0, 4), (4, 8)))
    SETTINGS = CheckpointSettings(keep_last=9)

    def scales(self, *values: float) -> dict[str, Fixed]:
        """Return those of two ranks as if one had both, each under the name of a parameter."""
        pairs = zip(("a", "b"), self.HALVES, values, strict=True)
        return {
            f"scale.{name}": Fixed.of(torch.tensor([value]), holding)
            for name, holding, value in pairs
        }

    def test_they_come_back_under_the_same_layout(self, tmp_path: Path) -> None:
        into = self.scales(0, 0)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, self.scales(1, 2), {})
            checkpoints.load(into)
        assert [float(each.tensor) for each in into.values()] == [1, 2]

    def test_under_another_layout_they_are_refused_once(self, tmp_path: Path) -> None:
        turned = dict(zip(self.scales(0, 0), reversed(self.scales(0, 0).values()), strict=True))
        whole = {name: torch.zeros(1) for name in turned}
        with Checkpoints(tmp_path, self.SETTINGS) as checkpoints:
            checkpoints.save(1, self.scales(1, 2), {})
            checkpoints.save(2, whole, {})
            for step, into in ((1, turned), (1, whole), (2, turned)):
                with pytest.raises(InputError, match="8-bit moments") as raised:
                    checkpoints.load(into, step)
                if step == 1:
                    assert len(raised.value.problems) == 1
