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
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.config.rl_config import TaskConfig, WarmupConfig
from meshwright.run.posttrain.rollout import read_rollouts
from meshwright.run.posttrain.workers.pool_startup import build_worker_engine_configs
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.posttrain.workers.worker_link import ProcessWorkerLink
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.worker.protocol import AddRequests, UtilityCall, WorkerMessage
from meshwright.spec.model import build_decoder_model
from tests.run.posttrain.rl.small import EVALUATED, settings


def test_workers_share_a_device_or_have_their_own() -> None:
    engine = EngineConfig(device="cuda:0", gpu_memory_utilization=0.5)
    beside = build_worker_engine_configs(
        engine, WorkerConfig(num_workers=2, tensor_parallel_size=2)
    )
    assert [
        (each.device, each.gpu_memory_utilization, each.tensor_parallel_size) for each in beside
    ] == [("cuda:0", 0.25, 2)] * 2
    apart = build_worker_engine_configs(
        engine, WorkerConfig(num_workers=3, devices=("cuda:1", "cuda:2"))
    )
    shares = [(each.device, each.gpu_memory_utilization) for each in apart]
    assert shares == [("cuda:1", 0.45), ("cuda:2", 0.9), ("cuda:1", 0.45)]


def test_every_rank_of_a_worker_counts_on_its_device() -> None:
    engine = EngineConfig(device="cuda:0", gpu_memory_utilization=0.5)
    overlapping = build_worker_engine_configs(
        engine, WorkerConfig(num_workers=2, tensor_parallel_size=2, devices=("cuda:1", "cuda:2"))
    )
    assert [each.gpu_memory_utilization for each in overlapping] == [0.45, 0.45], (
        "both are on cuda:2"
    )
    apart = build_worker_engine_configs(
        engine, WorkerConfig(num_workers=2, tensor_parallel_size=2, devices=("cuda:1", "cuda:3"))
    )
    assert [each.gpu_memory_utilization for each in apart] == [0.9, 0.9]
    beside = build_worker_engine_configs(
        engine, WorkerConfig(num_workers=1, tensor_parallel_size=2, devices=("cuda",))
    )
    assert beside[0].gpu_memory_utilization == 0.5, "its first rank is beside the trainer"


class Deaf:
    """A process that reads nothing."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.ended = False

    def stop(self) -> None:
        self.ended = True
        self.socket.close()
        self._other.close()


def test_a_worker_that_takes_no_message_is_ended_and_says_so() -> None:
    link, process = ProcessWorkerLink.__new__(ProcessWorkerLink), Deaf()
    link.__dict__.update(_process=process, _patience_s=0.01, _why="")
    link.send(UtilityCall(1, "sleep", payload=bytes(1 << 24)))
    assert process.ended
    assert link.exit_reason() == "it took no message for 0.01 s (half of stall_timeout_s)"
    link.send(UtilityCall(2, "sleep"))  # as to any that is gone


@pytest.mark.slow
def test_a_folder_is_trained_on_turns_of_ones_own(tmp_path: Path) -> None:
    model = build_decoder_model("small", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=32)
    made = build_decoder(model, dtype=torch.float32)
    materialize(made, "cpu", seed=5)
    save_hf_checkpoint(made, tmp_path / "model")
    here = "tests.run.posttrain.workers.talking:talk"
    given: dict[str, Any] = {
        "model": str(tmp_path / "model"), "task": TaskConfig(name=here), "max_turns": 3,
        "warm_up": WarmupConfig(), "evaluate": EVALUATED, "steps": 2,
    }  # fmt: skip
    own = run_rl(settings(**given))
    folder = tmp_path / "run"
    outcome = run_rl(settings(**given, workers=WorkerConfig(num_workers=2), folder=str(folder)))
    drawn = read_rollouts(folder / "rollouts.jsonl").rollouts
    assert {len(each.turns) for each in drawn} == {3}
    assert outcome.held_out_metrics == own.held_out_metrics
    assert max(row["logprob_gap_max"] for row in outcome.step_metrics) <= 1e-5


@pytest.mark.slow
def test_what_keeps_workers_from_starting_ends_the_run() -> None:
    with pytest.raises(InputError, match=r"no CUDA device is available|is asked for"):
        run_rl(settings(workers=WorkerConfig(num_workers=1, devices=("cuda:63",))))


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("placement", ["disaggregated", "colocated", "async"])
def test_workers_on_the_gpu_of_the_trainer(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, killed = ProcessWorkerLink.send, list[int]()

    def send(self: ProcessWorkerLink, message: WorkerMessage, /) -> None:
        sent(self, message)
        if isinstance(message, AddRequests) and not killed:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)

    given: dict[str, Any] = {"device": "cuda", "placement": placement, "steps": 4}
    workers = WorkerConfig(num_workers=2)
    whole = run_rl(settings(**given, workers=workers))
    monkeypatch.setattr(ProcessWorkerLink, "send", send)
    folder = tmp_path / "run"
    outcome = run_rl(settings(**given, workers=workers, folder=str(folder)))
    assert [note for note in outcome.notes if "started anew (1 of 3)" in note]
    drawn = [each.key for each in read_rollouts(folder / "rollouts.jsonl").rollouts]
    assert len(drawn) == len(set(drawn)) == 4 * 4 * 4
    if placement != "async":
        # The first step's answers, of which some were drawn again; later ones follow from training,
        # whose sums a GPU may order otherwise.
        assert outcome.step_metrics[0]["reward_mean"] == whole.step_metrics[0]["reward_mean"]
