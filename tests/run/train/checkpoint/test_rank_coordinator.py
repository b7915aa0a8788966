"""A rank that dies or hangs in a save ends the others soon, and is named; slow ones are let be."""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="saves on gloo ranks")

import torch

from meshwright.run.parallel.health.watchdog import Watchdog
from meshwright.run.parallel.launch.exit_reason import WATCHDOG_EXIT_CODE
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks_with_results
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.checkpoint import CheckpointConfig, CheckpointManager, rank_coordinator
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem
from meshwright.spec.layout import Layout

VICTIM, PATIENCE_S = 1, 2.0


class _Troubled(LocalFileSystem):
    """A disk on which something befalls one rank when its file is to be synced."""

    def __init__(self, folder: Path, trouble: str, rank: int) -> None:
        self.folder, self.trouble, self.rank = folder, trouble, rank

    def sync(self, file: int) -> None:
        if self.rank == VICTIM:
            (self.folder / "began").write_text(str(time.time()))
            if self.trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60 if self.trouble == "hangs" else 3 * PATIENCE_S)
        super().sync(file)


def _save(folder: Path, trouble: str, excuse_s: float) -> str:
    rank_coordinator._OPENING_S = excuse_s
    mesh = Mesh(Layout(dp=2, precision="fp32"))
    disk = _Troubled(folder, trouble, mesh.rank)
    settings = CheckpointConfig(async_save=trouble == "dies")
    with Watchdog(mesh, timeout_s=PATIENCE_S, folder=folder, tick_s=0.2, heartbeat_timeout_s=5.0):
        with CheckpointManager(
            folder / "checkpoints", settings, disk=disk, mesh=mesh
        ) as checkpoints:
            state = {f"w{mesh.rank}": torch.ones(64)}
            checkpoints.save(1, state, {})
            if trouble != "dies":
                mesh.world.all_reduce(torch.ones(1))
        return "saved"


@pytest.mark.parametrize("trouble", ["dies", "hangs"])
def test_the_others_end_soon_and_name_who_did_not_come(tmp_path: Path, trouble: str) -> None:
    outcomes = spawn_ranks_with_results(2, _save, tmp_path, trouble, 1.0, timeout_s=40)
    assert outcomes[0].exit_code == WATCHDOG_EXIT_CODE, outcomes[0]
    ended_s = (tmp_path / "watchdog-rank-00000.txt").stat().st_mtime
    assert ended_s - float((tmp_path / "began").read_text()) < 10  # of 60, and under load
    words = (tmp_path / "watchdog-rank-00000.txt").read_text()
    if trouble == "dies":
        assert "rank 1 died" in words
    else:
        assert "rank 1 has not entered all_gather number " in words
        assert "of group checkpoint" in words
        assert "(writes a checkpoint)" in words
        assert "async_save.py" in words


def test_a_slow_disk_is_waited_for_beyond_patience(tmp_path: Path) -> None:
    outcomes = spawn_ranks_with_results(2, _save, tmp_path, "is slow", 60.0, timeout_s=60)
    assert [each.value for each in outcomes] == ["saved", "saved"]
    assert not list(tmp_path.glob("watchdog-rank-*"))
