"""A worker whose engine is shared by two ranks draws for the loop, and outlives a rank's death."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.posttrain.loop import run
from meshwright.run.posttrain.rollouts import read_rollouts
from meshwright.run.posttrain.workers.links import ProcessLink
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.serve.worker.frames import Several, ToWorker
from tests.run.posttrain.loop.small import settings


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_shared_engine_draws_and_a_dead_rank_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, killed = ProcessLink.send, list[int]()

    def send(self: ProcessLink, message: ToWorker, /) -> None:
        sent(self, message)
        if isinstance(message, Several) and not killed:
            killed.extend(children(self.pid))
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(ProcessLink, "send", send)
    given: dict[str, Any] = {"folder": str(tmp_path / "run")}
    outcome = run(settings(workers=WorkerSettings(count=1, tp=2), **given))
    assert len(killed) == 1
    assert [note for note in outcome.notes if "started anew (1 of 3)" in note]
    # Sums over two ranks round otherwise than on one; what is drawn is the same all but always.
    alone = run(settings())
    assert outcome.rows[0]["reward_mean"] == pytest.approx(alone.rows[0]["reward_mean"], abs=0.1)
    assert max(row["logp_gap_max"] for row in outcome.rows) <= 1e-5
    drawn = [each.key for each in read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts]
    assert len(drawn) == len(set(drawn)) == 3 * 4 * 4
