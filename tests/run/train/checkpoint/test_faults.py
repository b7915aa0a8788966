"""A crash at any byte leaves a checkpoint that loads; damage is found and passed over."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from meshwright.errors import DamagedFile
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks_with_results
from meshwright.run.train.checkpoint import CheckpointConfig, CheckpointManager, CheckpointSaveError
from meshwright.run.train.checkpoint.checkpoint_folder import CheckpointFolder, is_complete
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem
from tests.run.train.checkpoint.faulty_disk import (
    FailingDisk,
    FullDisk,
    Loss,
    PowerCut,
    empty,
    loaded_step,
    save,
    save_and_die,
    state,
)


def _cut_at(folder: Path, ticks: int, loss: Loss) -> None:
    """Save step 1 well and step 2 until the power goes; what is left has to load."""
    save(folder, 1, LocalFileSystem())
    error: CheckpointSaveError | None = None
    try:
        save(folder, 2, FailingDisk(ticks, loss))
    except CheckpointSaveError as raised:
        error = raised
    assert error is None or isinstance(error.__cause__, PowerCut)
    assert loaded_step(folder) in ({1, 2} if error else {2})
    assert all(
        is_complete(found) for found in CheckpointFolder(folder, LocalFileSystem()).list_saved()
    )
    save(folder, 3, LocalFileSystem())
    assert loaded_step(folder) == 3
    assert [path.name for path in folder.iterdir() if path.name.startswith(".p")] == []


def _ticks(folder: Path) -> list[int]:
    """Return the ticks after each step of a save that deletes its predecessor."""
    save(folder, 1, LocalFileSystem())
    disk = FailingDisk()
    save(folder, 2, disk)
    return disk.boundaries


def _points(boundaries: list[int]) -> Iterator[int]:
    """Give every boundary between two steps, and places inside each long write."""
    for begin, end in zip([0, *boundaries], boundaries, strict=False):
        yield from {begin, (2 * begin + end) // 3, end - 1}


@pytest.mark.parametrize("loss", get_args(Loss))
def test_a_loss_of_power_at_any_step_leaves_a_checkpoint_that_loads(
    tmp_path: Path, loss: Loss
) -> None:
    for ticks in sorted(set(_points(_ticks(tmp_path / "whole")))):
        _cut_at(tmp_path / str(ticks), ticks, loss)


@pytest.mark.slow
@pytest.mark.parametrize("loss", get_args(Loss))
def test_a_loss_of_power_at_any_byte_leaves_a_checkpoint_that_loads(
    tmp_path: Path, loss: Loss
) -> None:
    for ticks in range(_ticks(tmp_path / "whole")[-1] + 1):
        _cut_at(tmp_path / str(ticks), ticks, loss)


def test_a_killed_process_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    boundaries = _ticks(tmp_path / "whole")
    # In the header, in the tensors, in the record, and while the old one is deleted.
    for ticks in (boundaries[2] - 5, boundaries[3] - 9, boundaries[6] - 20, boundaries[-2]):
        folder = tmp_path / str(ticks)
        save(folder, 1, LocalFileSystem())
        ended = spawn_ranks_with_results(1, save_and_die, folder, 2, ticks)[0]
        assert ended.exit_code == -signal.SIGKILL
        assert loaded_step(folder) in (1, 2)


def test_a_full_disk_fails_the_save_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    save(tmp_path, 1, LocalFileSystem())
    with pytest.raises(CheckpointSaveError, match=r"step 2 was not saved: .*No space left"):
        save(tmp_path, 2, FullDisk())
    assert loaded_step(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir() if "step-2" in path.name] == []


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)


def _flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


DAMAGE = (_truncate, _lengthen, _flip, _flip_header, Path.unlink)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_passed_over_with_a_warning_or_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    save(tmp_path, 1, LocalFileSystem(), keep_last=2)
    save(tmp_path, 2, LocalFileSystem(), keep_last=2)
    damage(tmp_path / "000002-step-2" / name)

    into = empty()
    strict = CheckpointConfig(on_damaged="error")
    with CheckpointManager(tmp_path, strict) as checkpoints, pytest.raises(DamagedFile, match=name):
        checkpoints.load(into)
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(DamagedFile, match=name):
        checkpoints.load(into, step=2)
    assert all(not tensor.any() for tensor in into.values())  # nothing was touched

    with pytest.warns(UserWarning, match=r"000002-step-2 is damaged and passed over"):
        assert loaded_step(tmp_path) == 1


def test_damage_everywhere_is_told_of_every_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, LocalFileSystem(), keep_last=2)
        _flip(tmp_path / f"00000{step}-step-{step}" / "rank-00000.safetensors")
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(DamagedFile) as raised:
        checkpoints.load(empty())
    assert len(raised.value.problems) == 2


def test_damaged_checkpoints_do_not_push_out_the_last_good_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, LocalFileSystem(), keep_last=2)
        if step == 2:
            _truncate(tmp_path / "000002-step-2" / "rank-00000.safetensors")
    assert {path.name for path in tmp_path.glob("0*")} == {
        "000001-step-1",
        "000002-step-2",
        "000003-step-3",
    }


def test_a_save_is_read_back_from_the_disk_before_its_commit_where_asked(tmp_path: Path) -> None:
    class Forgetful(LocalFileSystem):
        def write(self, file: int, data: memoryview, start: int) -> None:
            super().write(file, memoryview(bytes(len(data))) if start else data, start)

    settings = CheckpointConfig(verify="checksum-save-load")
    with CheckpointManager(tmp_path, settings, disk=Forgetful()) as checkpoints:
        checkpoints.save(1, state(1), {})
        with pytest.raises(CheckpointSaveError, match="damaged"):
            checkpoints.wait()
        assert checkpoints.list_saved() == ()


def test_a_latest_checkpoint_is_one_that_can_be_read(tmp_path: Path) -> None:
    save(tmp_path, 1, LocalFileSystem(), keep_last=2)
    save(tmp_path, 2, LocalFileSystem(), keep_last=2)
    (tmp_path / "000002-step-2" / "checkpoint.json").write_text("{}")
    with CheckpointManager(tmp_path) as checkpoints:
        latest = checkpoints.find_latest()
        assert latest is not None
        assert latest.step == 1
        assert [found.step for found in checkpoints.list_saved()] == [1, 2]


def test_a_copy_that_fails_is_told_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), {"step": 1})
        broken = state(2)
        with monkeypatch.context() as patch:
            patch.setattr(
                "meshwright.run.train.checkpoint.staging.view_as_bytes",
                lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")),
            )
            with pytest.raises(torch.OutOfMemoryError):
                checkpoints.save(2, broken, {})
        with pytest.raises(CheckpointSaveError, match="no memory"):
            checkpoints.wait()
        checkpoints.save(3, state(3), {"step": 3})
    assert loaded_step(tmp_path) == 3
