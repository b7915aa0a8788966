"""Workers that actors of a real Ray keep draw for the loop, and are replaced where they die."""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.run.posttrain.rl import RLResult, run_rl
from meshwright.run.posttrain.rl.config.rl_config import AdapterConfig
from meshwright.run.posttrain.rollout import read_rollouts
from meshwright.run.posttrain.workers.ray_workers import RayWorkerLink
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.serve.worker.protocol import AddRequests, WorkerMessage
from tests.run.posttrain.rl.small import settings

pytestmark = [pytest.mark.slow, pytest.mark.real]


def learnt(outcome: RLResult) -> list[torch.Tensor]:
    adapter = () if outcome.adapter is None else outcome.adapter.parameters()
    return [*outcome.decoder.parameters(), *adapter]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=4)], ids=["", "adapter"])
@pytest.mark.parametrize("who", ["nobody", "process", "actor"])
def test_actors_draw_and_the_dead_are_replaced(
    who: str, adapter: AdapterConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'meshwright[ray]'")
    sent, killed, folders = RayWorkerLink.send, list[int](), set[str]()

    def send(self: RayWorkerLink, message: WorkerMessage, /) -> None:
        sent(self, message)
        folders.add(self._folder)
        if who != "nobody" and isinstance(message, AddRequests) and not killed:
            killed.append(self.pid if who == "process" else parent(self.pid))
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(RayWorkerLink, "send", send)
    workers = WorkerConfig(num_workers=2, ray_address="local", max_restarts=1)
    outcome = run_rl(settings(workers=workers, folder=str(tmp_path / "run"), adapter=adapter))
    gone = [note for note in outcome.notes if "is gone" in note]
    assert len(gone) == len(killed) == (who != "nobody")
    assert all(("SIGKILL" if who == "process" else "Ray actor is gone") in each for each in gone)
    drawn = [each.key for each in read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts]
    assert len(drawn) == len(set(drawn)) == 3 * 4 * 4
    alone = run_rl(settings(workers=WorkerConfig(num_workers=2), adapter=adapter))
    pairs = zip(learnt(outcome), learnt(alone), strict=True)
    assert all(torch.equal(mine, its) for mine, its in pairs), "as processes of this machine do"
    assert len(folders) == 2 + len(killed)
    until_s = time.monotonic() + 60
    while any(Path(each).exists() for each in folders):
        assert time.monotonic() < until_s, "weights are left behind"
        time.sleep(0.1)
