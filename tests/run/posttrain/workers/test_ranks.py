"""A worker whose engine is shared by two ranks draws for the loop, and outlives a rank's death."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rollout import read_rollouts
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.posttrain.workers.worker_link import ProcessWorkerLink
from meshwright.run.serve.worker.protocol import AddRequests, WorkerMessage
from tests.run.posttrain.rl.small import settings


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_shared_engine_draws_and_a_dead_rank_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, killed = ProcessWorkerLink.send, list[int]()

    def send(self: ProcessWorkerLink, message: WorkerMessage, /) -> None:
        sent(self, message)
        if isinstance(message, AddRequests) and not killed:
            killed.extend(children(self.pid))
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(ProcessWorkerLink, "send", send)
    given: dict[str, Any] = {"folder": str(tmp_path / "run")}
    outcome = run_rl(settings(workers=WorkerConfig(num_workers=1, tensor_parallel_size=2), **given))
    assert len(killed) == 1
    assert [note for note in outcome.notes if "started anew (1 of 3)" in note]
    # Sums over two ranks round otherwise than on one; what is drawn is the same all but always.
    alone = run_rl(settings())
    assert outcome.step_metrics[0]["reward_mean"] == pytest.approx(
        alone.step_metrics[0]["reward_mean"], abs=0.1
    )
    assert max(row["logprob_gap_max"] for row in outcome.step_metrics) <= 1e-5
    drawn = [each.key for each in read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts]
    assert len(drawn) == len(set(drawn)) == 3 * 4 * 4
