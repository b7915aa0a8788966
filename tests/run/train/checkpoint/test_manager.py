"""Saving and loading in one process."""

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from meshwright.errors import DamagedFile, InputError
from meshwright.run.train.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointReader,
    CheckpointSaveError,
)
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem
from meshwright.run.train.checkpoint.safetensors_layout import TORCH_DTYPES
from tests.run.freed import Memory
from tests.run.train.checkpoint.faulty_disk import FullDisk, empty, loaded_step, state


def _every_kind() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(3)
    tensors = {}
    for name, dtype in TORCH_DTYPES.items():
        data = torch.from_numpy(rng.integers(0, 2, (3, 5 * dtype.itemsize), dtype=np.uint8))
        tensors[name] = data.view(dtype)
    return tensors | {
        "scalar": torch.tensor(2.5),
        "none at all": torch.empty(0, 4),
        "not in order": torch.arange(12.0).reshape(3, 4).t(),
        "a parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_every_kind_of_tensor_comes_back_bit_by_bit(tmp_path: Path) -> None:
    saved = _every_kind()
    into = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    homes = {name: tensor.data_ptr() for name, tensor in into.items()}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(7, saved, {})
        assert checkpoints.load(into).step == 7
    for name, tensor in saved.items():
        assert into[name].data_ptr() == homes[name]
        same = into[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(same, tensor.detach().contiguous().reshape(-1).view(torch.uint8)), name


def test_what_was_saved_is_not_held(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            tensors = state(step)
            checkpoints.allocate_staging(tensors)
            checkpoints.save(step, tensors, {"step": step})
            memory = [Memory(each) for each in tensors.values()]
            tensors.clear()
            assert all(each.is_free for each in memory)
    assert loaded_step(tmp_path) == 2


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "generator": np.random.default_rng(5).bit_generator.state,  # whole numbers of 128 bits
        "loss": 0.1 + 0.2,
        "words": ["ä", None, True, {"deep": [1, [2]]}],
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), extra)
        assert checkpoints.load(empty()).extra == extra


def test_training_may_change_tensors_as_soon_as_save_returns(tmp_path: Path) -> None:
    class Waiting(LocalFileSystem):
        def __init__(self) -> None:
            self.go = threading.Event()

        def make_folder(self, path: Path) -> None:
            self.go.wait()
            super().make_folder(path)

    disk = Waiting()
    tensors = state(1)
    with CheckpointManager(tmp_path, disk=disk) as checkpoints:
        checkpoints.save(1, tensors, {"step": 1})
        for tensor in tensors.values():
            tensor.zero_()
        assert checkpoints.list_saved() == ()  # still being written
        disk.go.set()
    assert loaded_step(tmp_path) == 1


def test_a_blocking_save_is_there_when_it_returns(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(async_save=False)) as checkpoints:
        checkpoints.save(1, state(1), {})
        assert [found.step for found in checkpoints.list_saved()] == [1]


def test_a_load_sees_the_save_in_flight(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state(step), {})
            assert checkpoints.load(empty()).step == step


def test_a_failure_in_the_background_is_raised_by_the_next_call_and_only_once(
    tmp_path: Path,
) -> None:
    checkpoints = CheckpointManager(tmp_path, disk=FullDisk())
    checkpoints.save(1, state(1), {})
    with pytest.raises(CheckpointSaveError, match="step 1"):
        checkpoints.save(2, state(2), {})
    checkpoints.wait()
    checkpoints.save(3, state(3), {})
    with pytest.raises(CheckpointSaveError, match="step 3"):
        checkpoints.close()


def test_the_last_ones_and_the_round_ones_stay(tmp_path: Path) -> None:
    settings = CheckpointConfig(keep_last=2, keep_every=4)
    with CheckpointManager(tmp_path, settings) as checkpoints:
        for step in range(1, 11):
            checkpoints.save(step, state(step), {})
        checkpoints.wait()
        assert [found.step for found in checkpoints.list_saved()] == [4, 8, 9, 10]


def test_a_run_that_went_back_goes_on_from_where_it_saved_last(tmp_path: Path) -> None:
    settings = CheckpointConfig(keep_last=9)
    with CheckpointManager(tmp_path, settings) as checkpoints:
        for step in (100, 200, 300):
            checkpoints.save(step, state(step), {"step": step})
        checkpoints.load(empty(), step=100)
        checkpoints.save(200, state(200), {"step": 200})
        checkpoints.wait()
        assert [found.path.name for found in checkpoints.list_saved()] == [
            "000001-step-100",
            "000002-step-200",
            "000003-step-300",
            "000004-step-200",
        ]
        assert checkpoints.load(empty(), step=200).checkpoint.save_index == 4
    assert loaded_step(tmp_path) == 200


def test_names_shapes_and_types_that_do_not_fit_are_all_told_before_anything_changes(
    tmp_path: Path,
) -> None:
    into = {
        "weight": torch.zeros(5, 9),
        "moment": torch.zeros(3, 7),
        "strange": torch.zeros(1),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), {})
        with pytest.raises(InputError) as raised:
            checkpoints.load(into)
    assert [(problem.where, problem.what) for problem in raised.value.problems] == [
        ("weight", "it was saved as [5, 8] and is [5, 9] here"),
        ("moment", "it was saved as torch.bfloat16 and is torch.float32 here"),
        ("strange", "the checkpoint has no such tensor"),
        ("count", "it was saved, and nothing asks for it"),
    ]
    assert all(not tensor.any() for tensor in into.values())


def test_some_of_the_tensors_can_be_loaded_alone(tmp_path: Path) -> None:
    into = {"weight": torch.zeros(5, 8)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), {})
        checkpoints.load(into, leftover="ignore")
    assert torch.equal(into["weight"], state(1)["weight"])


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {
        "meta": torch.empty(2, device="meta"),
        "complex": torch.zeros(1, dtype=torch.complex128),
        "list": [1.0],
    }
    extra = {"loss": float("nan"), "rows": [{1: "one"}, {"x": {2}}]}
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(InputError) as raised:
        checkpoints.save(-1, tensors, extra)  # type: ignore[arg-type]
    assert [problem.where for problem in raised.value.problems] == [
        "extra.loss",
        "extra.rows[0]",
        "extra.rows[1].x",
        "step",
        "meta",
        "complex",
        "list",
    ]


def test_an_absent_checkpoint_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "nowhere") as checkpoints:
        assert checkpoints.find_latest() is None
        with pytest.raises(InputError, match="there is no checkpoint"):
            checkpoints.load(empty())
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, state(step), {})
        with pytest.raises(InputError, match=r"no checkpoint of step 15 \(fix: use one of 10, 20"):
            checkpoints.load(empty(), step=15)


def test_two_runs_cannot_write_into_one_folder(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first, CheckpointManager(tmp_path) as second:
        first.save(1, state(1), {})
        first.wait()
        second.save(2, state(2), {})
        with pytest.raises(CheckpointSaveError, match="another process writes checkpoints here"):
            second.wait()
    with CheckpointManager(tmp_path) as third:
        third.save(3, state(3), {"step": 3})
    assert loaded_step(tmp_path) == 3


def test_torch_and_safetensors_read_what_we_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
        path = checkpoints.list_saved()[0].path
    plain = load_file(path / "rank-00000.safetensors")
    into = empty()
    with pytest.warns(UserWarning, match="single process"):
        load_distributed(into, storage_reader=CheckpointReader(path))
    for name, tensor in state(1).items():
        assert torch.equal(plain[name], tensor)
        assert torch.equal(into[name], tensor)


class Bomb:
    """Unpickling one of these leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_nothing_from_the_disk_is_unpickled(tmp_path: Path) -> None:
    trace = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(trace))
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
        path = checkpoints.list_saved()[0].path
        (path / ".metadata").write_bytes(bomb)  # where torch's own reader looks
        checkpoints.load(empty())
        for name in ("rank-00000.safetensors", "checkpoint.json"):
            (path / name).write_bytes(bomb)
            with pytest.raises(DamagedFile):
                checkpoints.load(empty())
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists()  # it would have gone off
