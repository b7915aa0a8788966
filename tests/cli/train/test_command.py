"""`mw train`: one file and some words in, a run's folder out."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.cli.flags.overrides import parse_overrides
from meshwright.errors import InputError
from meshwright.run.parallel.launch import config_consensus
from meshwright.run.train.train_session import TrainSession
from tests.run.train.tiny import STEPS, rows_of, saved_steps, write_corpus, write_job

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens, by bytes."""
    return write_corpus(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def job(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job file in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path / "tiny.toml", tokens).name


def said(capsys: Captured) -> str:
    """Return the answer and the notes."""
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_a_run_writes_its_folder(job: str, capsys: Captured) -> None:
    assert main(["train", job]) == 0
    printed = capsys.readouterr()
    assert f"{STEPS} of {STEPS}" in printed.out
    run = Path("runs/tiny")
    assert {"config.toml", "metrics.jsonl", "checkpoints", "report.html"} <= {
        path.name for path in run.iterdir()
    }
    assert len(rows_of(run)) == STEPS


def test_json_and_quiet_answers(job: str, capsys: Captured) -> None:
    assert main(["train", job, "--json", "--stop-at-step", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.train/2"
    assert (answer["steps"], answer["total_steps"], answer["folder"]) == (2, STEPS, "runs/tiny")
    assert main(["train", job, "-q"]) == 0
    printed = capsys.readouterr()
    assert float(printed.out) == pytest.approx(
        rows_of(Path("runs/tiny"), "eval_loss")[STEPS], rel=1e-5
    )


def test_the_same_command_goes_on(job: str, capsys: Captured) -> None:
    main(["train", job, "--stop-at-step", "3"])
    assert "the same command without --stop-at-step" in said(capsys)
    main(["train", job])
    assert f"{STEPS} of {STEPS}, from 3 on" in capsys.readouterr().out
    assert main(["train", job]) == 0
    assert "was finished before" in said(capsys)


def test_the_configuration_of_a_run_goes_on_with_it(job: str, capsys: Captured) -> None:
    main(["train", job, "--stop-at-step", "3"])
    assert main(["train", "runs/tiny/config.toml"]) == 0
    assert "from 3 on" in capsys.readouterr().out
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"]


def test_a_run_is_named_by_its_folder_too(job: str, capsys: Captured) -> None:
    main(["train", job, "--stop-at-step", "3"])
    assert main(["train", "runs/tiny", "--stop-at-step", "5"]) == 0
    assert f"5 of {STEPS}, from 3 on" in said(capsys)
    assert not Path("runs/config").exists()


def test_a_session_that_had_no_step_to_do_says_so(job: str, capsys: Captured) -> None:
    main(["train", job, "--stop-at-step", "3"])
    said(capsys)
    assert main(["train", job, "--stop-at-step", "2"]) == 0
    assert "step 2 was done before" in said(capsys)


def test_fresh_leaves_a_folder_that_is_no_run_where_it_is(job: str) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep")
    assert main(["train", job, "--output-dir", "mine", "--no-resume", "--stop-at-step", "1"]) == 0
    assert Path("mine/notes.txt").read_text() == "keep"
    assert not Path("mine.1").exists()


def test_a_folder_of_tokens_is_no_place_for_a_run(job: str, tokens: Path, capsys: Captured) -> None:
    assert main(["train", job, "--output-dir", str(tokens)]) == 2
    assert "holds tokenized text" in said(capsys)
    assert not (tokens / "checkpoints").exists()


def test_a_job_that_never_began_leaves_no_folder(job: str) -> None:
    assert main(["train", job, "data.sources=nowhere", "--output-dir", "new"]) == 2
    assert not Path("new").exists()


def test_a_run_that_has_no_checkpoint_yet_is_gone_on_with_by_its_folder(job: str) -> None:
    main(["train", job, "--stop-at-step", "1"])
    shutil.rmtree("runs/tiny/checkpoints")
    Path("runs/tiny/metrics.jsonl").unlink()
    assert main(["train", "runs/tiny", "--stop-at-step", "1"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["tiny"]


def test_what_is_hardly_meant_is_told(job: str, capsys: Captured) -> None:
    main(["train", job, "--dry-run", "optimizer.warmup_steps=500", "model.max_positions=8"])
    told = said(capsys)
    assert "learning rate only ever rises" in told
    assert "model.max_positions 8" in told


def test_products_too_small_for_fp8_are_told(job: str, capsys: Captured) -> None:
    main(["train", job, "layout.precision=fp8-rowwise", "--stop-at-step", "1"])
    assert "no GEMM of this model runs in fp8" in said(capsys)


@pytest.mark.filterwarnings("default")
def test_fresh_moves_an_earlier_run_aside(job: str, capsys: Captured) -> None:
    main(["train", job, "--stop-at-step", "3"])
    assert main(["train", job, "--stop-at-step", "2", "--no-resume"]) == 0
    assert "moved the earlier run to runs/tiny.1" in said(capsys)
    assert (saved_steps(Path("runs/tiny.1")), saved_steps(Path("runs/tiny"))) == ([3], [2])


@pytest.mark.parametrize(
    "words",
    [["--dry-run", "optimizer.lr=0.5"], ["optimizer.lr=0.5", "--dry-run"],
     ["seed=1", "--dry-run", "--json", "optimizer.lr=0.5"]],
)  # fmt: skip
def test_changes_may_stand_before_and_after_flags(
    words: list[str], job: str, capsys: Captured
) -> None:
    flags = [word for word in words if word != "--json"]
    assert main(["train", job, *flags, "--json"]) == 0
    values = {row["field"]: row for row in json.loads(capsys.readouterr().out)["values"]}
    assert values["optimizer.lr"] == {
        "field": "optimizer.lr", "value": 0.5, "source": "command line"
    }  # fmt: skip
    assert values["optimizer.warmup_steps"]["source"] == job
    assert values["loss_guard.max_skipped_steps"]["source"] == "default"
    assert not Path("runs").exists()


def test_words_become_values() -> None:
    words = ["optimizer.lr=1e-3", "data.sources=['a', 'b']", "device.cuda_graph=true", "model=x-1b"]
    assert parse_overrides(words) == {
        "optimizer": {"lr": 1e-3},
        "data": {"sources": ["a", "b"]},
        "device": {"cuda_graph": True},
        "model": "x-1b",
    }


@pytest.mark.parametrize("word", ["lr", "=3", "a..b=3", ".=1"])
def test_words_that_change_nothing_are_refused(word: str) -> None:
    with pytest.raises(InputError, match="changes nothing"):
        parse_overrides([word])


def test_a_value_and_values_inside_it_are_refused_together() -> None:
    with pytest.raises(InputError, match="stands beside values inside it"):
        parse_overrides(["optimizer.lr=1", "optimizer=3"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["optimzer.lr=3"], "command line: optimzer: there is no part named"),
        (["optimizer.lr=fast"], "command line: optimizer.lr: 'fast' is not a number"),
        (["--stop-at-step", "0"], "'0' is no step"),
        (["--stop-at-step", "x"], "'x' is no step"),
        (["--profile-steps", "x"], "names no steps"),
        (["--profil", "3"], "did you mean --profile-steps?"),
    ],
)
def test_mistakes_are_named(words: list[str], text: str, job: str, capsys: Captured) -> None:
    assert main(["train", job, *words]) == 2
    assert text in capsys.readouterr().err


def test_more_processes_than_ranks_are_refused(
    job: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(config_consensus, "REJECT_WAIT_S", 0.1)
    assert main(["train", job]) == 2
    assert "8 processes were started" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_with_its_code(
    job: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    plain = TrainSession.step

    def step(self: TrainSession, batch: Any, wait_s: float) -> None:
        plain(self, batch, wait_s)
        if self.trainer.step_number == 4:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(TrainSession, "step", step)
        assert main(["train", job]) == code
    assert f"stopped by {number.name} after step 4, which is saved" in said(capsys)
    assert saved_steps(Path("runs/tiny")) == [4]
    assert main(["train", job, "logging.progress=lines"]) == 0, "the same command goes on"
    assert "resumes after step 4 of " in said(capsys)


def test_a_signal_in_the_last_step_leaves_a_run_that_is_done(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TrainSession.step

    def step(self: TrainSession, batch: Any, wait_s: float) -> None:
        plain(self, batch, wait_s)
        if self.trainer.step_number == self.trainer.total_steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainSession, "step", step)
    assert main(["train", job]) == 0


@pytest.mark.filterwarnings("default")
def test_losses_that_are_no_numbers_end_a_run_with_the_checkpoint_to_go_back_to(
    job: str, capsys: Captured
) -> None:
    main(["train", job, "--stop-at-step", "2"])
    capsys.readouterr()
    assert main(["train", job, "optimizer.lr=1e37", "loss_guard.max_skipped_steps=1"]) == 1
    printed = capsys.readouterr().err
    assert "note: the gradient of step 4 is nan" in printed
    assert "error: stopped at step 5: the gradient of step 5 is nan (step 2 in a row)" in printed
    assert "the last good checkpoint is runs/tiny/checkpoints/000001-step-2" in printed
    assert "Traceback" not in printed
    assert "stopped" in Path("runs/tiny/report.html").read_text()


def test_profiled_steps_open_as_a_timeline(job: str, capsys: Captured) -> None:
    assert main(["train", job, "--stop-at-step", "3", "--profile-steps", "2-3"]) == 0
    assert "mw timeline show runs/tiny/timeline" in said(capsys)
    assert main(["timeline", "show", "runs/tiny/timeline", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["source"] == "measured"
    assert {row["kind"] for row in shown["kinds"]} == {"host", "compute"}
    assert main(["timeline", "perfetto", "runs/tiny/timeline", "trace.json"]) == 0
    names = {
        event.get("name") for event in json.loads(Path("trace.json").read_text())["traceEvents"]
    }
    assert {"step 2", "step 3", "backward"} <= names


def test_a_job_file_is_a_work_file_too(job: str, capsys: Captured) -> None:
    assert main(["simulate", job, "--cluster", "h100-superpod", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "meshwright.simulate/2"


def test_several_outputs_take_the_figures_of_one_run(
    job: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from meshwright.run.train.logging.prometheus import PrometheusLogger

    shown: list[set[str]] = []
    close = PrometheusLogger.close

    def look(page: PrometheusLogger) -> None:
        shown.append(set(page._gauges))
        close(page)

    monkeypatch.setattr(PrometheusLogger, "close", look)
    words = ["logging.tensorboard=true", "logging.prometheus={port=0}"]
    assert main(["train", job, *words]) == 0
    (gauges,) = shown
    assert {"mw_train_step", "mw_train_loss", "mw_train_eval_loss"} <= gauges
    read = accumulator.EventAccumulator("runs/tiny/tensorboard").Reload()
    assert [event.step for event in read.Scalars("train/loss")] == list(rows_of(Path("runs/tiny")))


def test_examples_are_read(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert main(["train", "examples/train-tiny.toml", "--dry-run"]) == 0
    assert "examples/train-tiny.toml" in capsys.readouterr().out
