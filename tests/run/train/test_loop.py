"""The loop: a run that was stopped, killed or crashed goes on as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import DamagedFile, InputError
from meshwright.run.train.loop import train
from meshwright.run.train.loss_guard import TrainingStoppedError
from meshwright.run.train.profiling.step_profiler import ProfiledSteps
from meshwright.run.train.train_result import TrainResult
from meshwright.run.train.train_session import TrainSession
from meshwright.run.train.trainer import Trainer
from tests.run.train.tiny import (
    STEPS,
    bytes_saved,
    rows_of,
    saved_steps,
    saved_tensors,
    tiny_job,
    write_job,
)


@pytest.fixture(scope="module")
def whole(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    run = tmp_path_factory.mktemp("whole")
    train(tiny_job(tokens), run)
    return run


def test_a_run_learns_and_says_what_it_did(tokens: Path, tmp_path: Path) -> None:
    outcome = train(tiny_job(tokens), tmp_path)
    losses = rows_of(tmp_path)
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1]
    assert (outcome.steps, outcome.total_steps, outcome.resumed_at_step) == (STEPS, STEPS, None)
    assert outcome.tokens == STEPS * 4 * 32
    assert outcome.loss == pytest.approx(sum(losses.values()) / STEPS)
    assert outcome.eval_loss == rows_of(tmp_path, "eval_loss")[STEPS]
    assert saved_steps(tmp_path) == [10, STEPS]


def test_the_first_step_of_a_session_tells_no_speed(whole: Path) -> None:
    assert list(rows_of(whole, "tokens_per_s")) == list(range(2, STEPS + 1))


@pytest.mark.parametrize("at", [3, 5])
def test_a_run_in_two_sessions_ends_as_in_one(
    whole: Path, tokens: Path, tmp_path: Path, at: int
) -> None:
    train(tiny_job(tokens), tmp_path, stop_at_step=at)
    outcome = train(tiny_job(tokens), tmp_path)
    assert outcome.resumed_at_step == at
    assert rows_of(tmp_path) == rows_of(whole)
    assert bytes_saved(tmp_path) == bytes_saved(whole)


def test_other_microbatches_train_the_same_sequences(
    whole: Path, tokens: Path, tmp_path: Path
) -> None:
    train(tiny_job(tokens), tmp_path, stop_at_step=4)
    train(tiny_job(tokens, {"layout": {"microbatch": 4}}), tmp_path)
    assert rows_of(tmp_path) == pytest.approx(rows_of(whole), rel=1e-5)


EVERYTHING: dict[str, Any] = {
    "layout": {"precision": "bf16", "optimizer": "muon", "moment_precision": "bf16",
               "master_precision": "none"},
    "optimizer": {"ema_decay": 0.9},
    "workload": {"packing": "pack"},
}  # fmt: skip


EXPERTS: dict[str, Any] = {
    "model": {
        "multi_token": {"depth": 1, "block": "sparse"},
        "pattern": "2*sparse",
        "blocks": [{
            "name": "sparse",
            "mixer": {"kind": "attention", "heads": 2, "kv_heads": 1, "head_dim": 8, "rotary": {}},
            "mlp": {"kind": "experts", "count": 4, "top_k": 2, "width": 16,
                    "router_bias": "balance"},
        }],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [EVERYTHING, {"layout": {"precision": "fp16"}}, EXPERTS],
    ids=["everything", "fp16", "experts"],
)
def test_every_kind_of_state_is_resumed_exactly(
    tokens: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    job = tiny_job(tokens, {**changes, "workload": {"tokens": 7 * 128, "packing": "pack"}})
    train(job, tmp_path / "whole")
    train(job, tmp_path / "parts", stop_at_step=4)
    train(job, tmp_path / "parts")
    assert bytes_saved(tmp_path / "parts") == bytes_saved(tmp_path / "whole")


def test_a_killed_run_goes_on_to_the_same_end(tokens: Path, tmp_path: Path) -> None:
    changes = {"workload": {"tokens": 150 * 128}, "checkpoint": {"every_steps": 7}}
    job = tiny_job(tokens, changes)
    train(job, tmp_path / "whole")
    path = write_job(tmp_path / "job.toml", tokens, changes)
    run, rows = tmp_path / "killed", tmp_path / "killed" / "metrics.jsonl"
    words = [sys.executable, "-m", "meshwright", "train", str(path), "--output-dir", str(run)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + 60
        while not (rows.exists() and rows.read_bytes().count(b"\n") > 30):
            assert process.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert max(saved_steps(run), default=0) < 150
    train(job, run)
    assert rows_of(run) == rows_of(tmp_path / "whole")
    assert bytes_saved(run) == bytes_saved(tmp_path / "whole")


def test_a_finished_run_is_left_as_it_is(tokens: Path, tmp_path: Path) -> None:
    first = train(tiny_job(tokens), tmp_path)
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    again = train(tiny_job(tokens), tmp_path)
    assert (again.resumed_at_step, again.eval_loss) == (STEPS, first.eval_loss)
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows
    assert saved_steps(tmp_path) == [10, STEPS]


def test_more_tokens_go_on_with_a_finished_run(tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens), tmp_path)
    longer = tiny_job(tokens, {"workload": {"tokens": (STEPS + 2) * 128}})
    assert train(longer, tmp_path).steps == STEPS + 2


def _at_step(monkeypatch: pytest.MonkeyPatch, number: int, event: Any) -> None:
    """Let something happen within a step."""
    plain = TrainSession.step

    def step(self: TrainSession, batch: Any, wait_s: float) -> None:
        plain(self, batch, wait_s)
        if self.trainer.step_number == number:
            event()

    monkeypatch.setattr(TrainSession, "step", step)


def test_sigterm_saves_and_ends(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        outcome = train(tiny_job(tokens), tmp_path)
    assert (outcome.steps, outcome.stop_signal) == (3, "SIGTERM")
    assert saved_steps(tmp_path) == [3]
    assert train(tiny_job(tokens), tmp_path).resumed_at_step == 3


def _fail() -> None:
    raise RuntimeError("a crash")


def test_a_crash_before_the_first_checkpoint_begins_anew_and_loses_no_rows(
    whole: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _at_step(patch, 3, _fail)
        with pytest.raises(RuntimeError, match="a crash"):
            train(tiny_job(tokens), tmp_path)
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.warns(UserWarning, match=r"metrics\.1\.jsonl"):
        outcome = train(tiny_job(tokens), tmp_path)
    assert outcome.resumed_at_step is None
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == rows
    assert bytes_saved(tmp_path) == bytes_saved(whole)


def test_damaged_checkpoints_do_not_restart_a_run(tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens), tmp_path, stop_at_step=2)
    (file,) = tmp_path.glob("checkpoints/0*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=r"(?s)bytes of.*pass --no-resume"):
        train(tiny_job(tokens), tmp_path)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"seed": 2}, "seed"),
    ({"model": {"hidden": 32}}, "model.hidden"),
    ({"workload": {"global_batch": 2}}, "workload.global_batch"),
    ({"layout": {"precision": "bf16"}}, "layout.precision"),
    ({"layout": {"optimizer": "lion"}}, "layout.optimizer"),
    ({"optimizer": {"ema_decay": 0.9}}, "optimizer.ema_dtype"),
    ({"data": {"validation_fraction": 0.2}}, "data"),
]


def test_another_job_does_not_go_on_with_a_run(tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens), tmp_path, stop_at_step=1)
    for changes, where in CHANGES:
        with pytest.raises(InputError) as refused:
            train(tiny_job(tokens, changes), tmp_path)
        assert [problem.where for problem in refused.value.problems] == [where]


def test_two_processes_do_not_train_in_one_folder(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another() -> None:
        with pytest.raises(InputError, match="another process"):
            train(tiny_job(tokens), tmp_path)

    _at_step(monkeypatch, 1, another)
    train(tiny_job(tokens), tmp_path, stop_at_step=1)


def test_a_rate_far_too_high_stops_the_run_and_names_what_to_go_back_to(
    tokens: Path, tmp_path: Path
) -> None:
    train(tiny_job(tokens), tmp_path, stop_at_step=2)
    wild = tiny_job(tokens, {"optimizer": {"lr": 1e37}, "loss_guard": {"max_skipped_steps": 2}})
    with pytest.warns(UserWarning, match="is nan"), pytest.raises(TrainingStoppedError) as stopped:
        train(wild, tmp_path)
    assert "000001-step-2" in str(stopped.value)
    assert saved_steps(tmp_path) == [2]
    figures = rows_of(tmp_path, "skipped_steps")
    assert list(figures.values()) == [1, 2, 3]
    assert train(tiny_job(tokens), tmp_path).steps == STEPS


def test_weights_that_are_no_numbers_are_never_saved(tokens: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_job(tokens), tmp_path)
    with torch.no_grad():
        trainer.decoder.embedding.weight[3, 3] = torch.nan
    with pytest.raises(TrainingStoppedError, match="weights contain NaN or Inf"):
        trainer.save()
    trainer.close()
    assert saved_steps(tmp_path) == []


def test_evaluations_come_when_asked_for_and_at_the_end(tokens: Path, tmp_path: Path) -> None:
    job = tiny_job(tokens, {"eval": {"every_steps": 4}, "optimizer": {"ema_decay": 0.5}})
    train(job, tmp_path)
    assert list(rows_of(tmp_path, "eval_loss")) == [4, 8, 12]
    averaged = rows_of(tmp_path, "eval_loss_ema")
    assert averaged[12] != rows_of(tmp_path, "eval_loss")[12]


def test_evaluations_leave_training_alone(whole: Path, tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens, {"eval": {"every_steps": 2}}), tmp_path)
    assert rows_of(tmp_path) == rows_of(whole)


def test_a_run_begins_from_given_weights_and_resumes_without_them(
    whole: Path, tokens: Path, tmp_path: Path
) -> None:
    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.train.run_folder.trained_weights import load_trained_weights

    source = tmp_path / "weights"
    save_hf_checkpoint(load_trained_weights(whole, tiny_job(tokens)).decoder, source)
    job = tiny_job(tokens, {"initial_load_path": str(source), "optimizer": {"lr": 1e-9}})
    train(job, tmp_path / "run", stop_at_step=1)
    name = "model.embedding.weight"
    assert torch.allclose(saved_tensors(tmp_path / "run")[name], saved_tensors(whole)[name])
    for file in source.iterdir():
        file.unlink()
    assert train(job, tmp_path / "run", stop_at_step=2).resumed_at_step == 1


def _refusal(job: Any, folder: Path, **options: Any) -> str:
    with pytest.raises(InputError) as refused:
        train(job, folder, **options)
    return str(refused.value)


def test_what_cannot_be_done_is_refused_at_once(tokens: Path, tmp_path: Path) -> None:
    job = tiny_job(tokens)
    text = _refusal(job, tmp_path, stop_at_step=0, profile_steps=ProfiledSteps(99, 99))
    assert "no step 0" in text
    assert "none from 99 on" in text
    four = {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    text = _refusal(job, tmp_path, environment=four)
    assert "has 1 rank, and 4 processes were started" in text
    assert not list(tmp_path.iterdir())


def test_a_profile_of_no_step_of_this_session_is_told(tokens: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="had none of the steps 5-6"):
        outcome: TrainResult = train(
            tiny_job(tokens), tmp_path, stop_at_step=2, profile_steps=ProfiledSteps(5, 6)
        )
    assert outcome.steps == 2
