"""Several processes save together, and any other number loads."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.errors import DamagedFile, InputError
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.train.checkpoint import CheckpointConfig, CheckpointManager, CheckpointSaveError
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem

ROWS, COLUMNS = torch.arange(35.0).reshape(5, 7), torch.arange(24.0).reshape(4, 6).bfloat16()
PLAIN = {f"plain.{number}": torch.full((16,), float(number)) for number in range(4)}
WHOLE = {"rows": ROWS, "columns": COLUMNS, "count": torch.tensor(9), **PLAIN}


def _sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Shard rows unevenly and columns evenly over two ranks; leave the others whole on both."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        **tensors,
        "rows": distribute_tensor(tensors["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(tensors["columns"], mesh, [Shard(1)]),
    }


def _empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}


def _check(tensors: dict[str, torch.Tensor], factor: int) -> None:
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, WHOLE[name] * factor), name


def _two_ranks(folder: Path) -> list[int]:
    """Load what one process saved, save twice as much, and return what this rank wrote."""
    written = []
    with CheckpointManager(folder, CheckpointConfig(keep_last=5)) as checkpoints:
        into = _sharded(_empty())
        assert checkpoints.load(into).extra == {"by": "one"}
        _check(into, 1)
        for step in (2, 3):  # the second plan is the first one's
            for tensor in into.values():
                tensor.mul_(2)
            staged = checkpoints.save(step, into, {"by": f"rank {dist.get_rank()}"})
            written.append(staged.staged_bytes)
        checkpoints.wait()
        assert [found.step for found in checkpoints.list_saved()] == [1, 2, 3]
        # Only the second rank's tensors are new, and the first one's plan changes too.
        if dist.get_rank() == 1:
            into["from the second"] = torch.ones(3)
        checkpoints.save(4, into, {"by": "both"})
        checkpoints.load(into, leftover="ignore")
        _check({name: into[name] for name in WHOLE}, 4)
    return written


def test_one_saves_two_load_and_save_and_one_loads(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(keep_last=5)) as checkpoints:
        checkpoints.save(1, WHOLE, {"by": "one"})
    written = spawn_ranks(2, _two_ranks, tmp_path)
    total = sum(tensor.nbytes for tensor in WHOLE.values())
    for mine, other in zip(*written, strict=True):
        assert mine + other == total  # nothing is written twice
        assert min(mine, other) > total / 3  # and both take part
    with CheckpointManager(tmp_path) as checkpoints:
        for step, factor in ((2, 2), (3, 4)):
            into = _empty()
            assert checkpoints.load(into, step=step).extra == {"by": "rank 0"}
            _check(into, factor)
        more = {**_empty(), "from the second": torch.zeros(3)}
        checkpoints.load(more, step=4)
        assert torch.equal(more.pop("from the second"), torch.ones(3))
        _check(more, 4)
    assert sorted(path.name for path in (tmp_path / "000002-step-2").iterdir()) == [
        "checkpoint.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


class _FullOnSecond(LocalFileSystem):
    def write(self, file: int, data: memoryview, start: int) -> None:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        super().write(file, data, start)


def _troubled_ranks(folder: Path) -> None:
    second = dist.get_rank() == 1
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, _sharded(WHOLE), {})
    with CheckpointManager(folder, disk=_FullOnSecond()) as checkpoints:
        checkpoints.save(2, _sharded(WHOLE), {})
        with pytest.raises(CheckpointSaveError, match=r"rank 1: OSError: .*No space left"):
            checkpoints.wait()
        with pytest.raises(InputError, match=r"extra\.bad"):
            checkpoints.save(3, _sharded(WHOLE), {"bad": {1}} if second else {})
        with pytest.raises(InputError, match="nothing asks for it"):
            checkpoints.load({"count": torch.tensor(0)})
        with pytest.raises(InputError, match=r"count: it was saved as \[\] and is \[3\]"):
            checkpoints.load({**_empty(), "count": torch.zeros(3)} if second else _empty())
        assert [found.step for found in checkpoints.list_saved()] == [1]
        dist.barrier()
        damaged = checkpoints.list_saved()[0].path / "rank-00001.safetensors"
        if second:
            data = bytearray(damaged.read_bytes())
            data[-1] ^= 1
            damaged.write_bytes(data)
        dist.barrier()
        # One rank reads the damaged file, and both are told.
        with pytest.raises(DamagedFile, match="rank-00001"):
            checkpoints.load(_empty(), step=1)


def test_trouble_of_one_rank_is_told_to_all_and_nobody_waits(tmp_path: Path) -> None:
    spawn_ranks(2, _troubled_ranks, tmp_path, timeout_s=60)
