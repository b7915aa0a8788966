"""Runs whose workers draw: of a model's folder, in turns with an environment, on a GPU."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.build import build
from meshwright.run.nn.huggingface import save
from meshwright.run.nn.initialise import materialise
from meshwright.run.posttrain.loop import run
from meshwright.run.posttrain.loop.settings import TaskSettings, WarmUpSettings
from meshwright.run.posttrain.rollouts import read_rollouts
from meshwright.run.posttrain.workers.hiring import engines_of
from meshwright.run.posttrain.workers.links import ProcessLink
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.worker.frames import Call, Several, ToWorker
from meshwright.spec.model import decoder as model_of
from tests.run.posttrain.loop.small import EVALUATED, settings


def test_workers_share_a_device_or_have_their_own() -> None:
    engine = EngineSettings(device="cuda:0", memory_share=0.5)
    beside = engines_of(engine, WorkerSettings(count=2, tp=2))
    assert [(each.device, each.memory_share, each.tp) for each in beside] == [
        ("cuda:0", 0.25, 2)
    ] * 2
    apart = engines_of(engine, WorkerSettings(count=3, devices=("cuda:1", "cuda:2")))
    shares = [(each.device, each.memory_share) for each in apart]
    assert shares == [("cuda:1", 0.45), ("cuda:2", 0.9), ("cuda:1", 0.45)]


def test_every_rank_of_a_worker_counts_on_its_device() -> None:
    engine = EngineSettings(device="cuda:0", memory_share=0.5)
    overlapping = engines_of(engine, WorkerSettings(count=2, tp=2, devices=("cuda:1", "cuda:2")))
    assert [each.memory_share for each in overlapping] == [0.45, 0.45], "both are on cuda:2"
    apart = engines_of(engine, WorkerSettings(count=2, tp=2, devices=("cuda:1", "cuda:3")))
    assert [each.memory_share for each in apart] == [0.9, 0.9]
    beside = engines_of(engine, WorkerSettings(count=1, tp=2, devices=("cuda",)))
    assert beside[0].memory_share == 0.5, "its first rank is beside the trainer"


class Deaf:
    """A process that reads nothing."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.ended = False

    def end(self) -> None:
        self.ended = True
        self.socket.close()
        self._other.close()


def test_a_worker_that_takes_no_message_is_ended_and_says_so() -> None:
    link, process = ProcessLink.__new__(ProcessLink), Deaf()
    link.__dict__.update(_process=process, _patience_s=0.01, _why="")
    link.send(Call(1, "sleep", told=bytes(1 << 24)))
    assert process.ended
    assert link.last_words() == "it took no message for 0.01 s (half of stall_s)"
    link.send(Call(2, "sleep"))  # as to any that is gone


@pytest.mark.slow
def test_a_folder_is_trained_on_turns_of_ones_own(tmp_path: Path) -> None:
    model = model_of("small", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=32)
    made = build(model, dtype=torch.float32)
    materialise(made, "cpu", seed=5)
    save(made, tmp_path / "model")
    here = "tests.run.posttrain.workers.talking:talk"
    given: dict[str, Any] = {
        "model": str(tmp_path / "model"), "task": TaskSettings(name=here), "max_turns": 3,
        "warm_up": WarmUpSettings(), "evaluate": EVALUATED, "steps": 2,
    }  # fmt: skip
    own = run(settings(**given))
    folder = tmp_path / "run"
    outcome = run(settings(**given, workers=WorkerSettings(count=2), folder=str(folder)))
    drawn = read_rollouts(folder / "rollouts.jsonl").rollouts
    assert {len(each.turns) for each in drawn} == {3}
    assert outcome.held_out == own.held_out
    assert max(row["logp_gap_max"] for row in outcome.rows) <= 1e-5


@pytest.mark.slow
def test_what_keeps_workers_from_starting_ends_the_run() -> None:
    with pytest.raises(InputError, match=r"torch sees no GPU|is asked for"):
        run(settings(workers=WorkerSettings(count=1, devices=("cuda:63",))))


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("placement", ["disaggregated", "colocated", "asynchronous"])
def test_workers_on_the_gpu_of_the_trainer(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, killed = ProcessLink.send, list[int]()

    def send(self: ProcessLink, message: ToWorker, /) -> None:
        sent(self, message)
        if isinstance(message, Several) and not killed:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)

    given: dict[str, Any] = {"device": "cuda", "placement": placement, "steps": 4}
    workers = WorkerSettings(count=2)
    whole = run(settings(**given, workers=workers))
    monkeypatch.setattr(ProcessLink, "send", send)
    folder = tmp_path / "run"
    outcome = run(settings(**given, workers=workers, folder=str(folder)))
    assert [note for note in outcome.notes if "started anew (1 of 3)" in note]
    drawn = [each.key for each in read_rollouts(folder / "rollouts.jsonl").rollouts]
    assert len(drawn) == len(set(drawn)) == 4 * 4 * 4
    if placement != "asynchronous":
        # The first step's answers, of which some were drawn again; later ones follow from training,
        # whose sums a GPU may order otherwise.
        assert outcome.rows[0]["reward_mean"] == whole.rows[0]["reward_mean"]
