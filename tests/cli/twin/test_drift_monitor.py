"""`mw twin --monitor` judges a run that has ended, and follows one that has not."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.cli.twin import drift_monitor
from meshwright.run.train.run_folder.run_folder import lock_run_folder
from meshwright.spec.file_formats import dump_data
from tests.observe.twin.drift.test_run_steps import CONFIG

Captured = pytest.CaptureFixture[str]


def row(step: int, step_s: float, extra_s: float = 0.0) -> str:
    parts = {
        "step_gap_s": 0.0,
        "forward_backward_s": 0.9 * step_s + extra_s,
        "optimizer_s": 0.1 * step_s,
    }
    figures: dict[str, Any] = {"step": step, "step_s": step_s + extra_s, **parts}
    return json.dumps(figures if step == 1 else figures | {"tokens_per_s": 1.0}) + "\n"


def rows(first: int, count: int, extra_s: float = 0.0) -> str:
    random = np.random.default_rng(first)
    times = 0.2 * random.lognormal(0.0, 0.01, count)
    return "".join(row(first + at, float(s), extra_s) for at, s in enumerate(times))


@pytest.fixture(autouse=True)
def _built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CALIBRATIONS", "off")


def make_run(folder: Path, text: str, device: str = "CPU", gpu: str | None = None) -> Path:
    (folder / "config.toml").write_text(dump_data(CONFIG, ".toml"))
    session = {"after": 0, "device": device} | ({} if gpu is None else {"gpu": gpu})
    (folder / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_a_slowdown_of_a_run_that_ended_is_found(tmp_path: Path, capsys: Captured) -> None:
    run = make_run(tmp_path, rows(1, 150) + rows(151, 60, extra_s=0.04))
    words = ["twin", "--monitor", str(run), "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.twin-monitor/2"
    assert (answer["last_step"], answer["running"], answer["has_slowdown"]) == (210, False, True)
    assert answer["predicted"] is None  # cores, and no calibration of them
    assert "calibration" in answer["costs"]
    (found,) = answer["findings"]
    assert found["name"] == "step-drift"
    assert found["cost_ms_per_step"] == pytest.approx(40, rel=0.1)
    (change,) = answer["changes"]
    assert change["largest_change"] == "gradients"
    assert abs(change["since_step"] - 151) <= 2
    assert main([*words, "--check"]) == 1


def test_a_clean_run_finds_nothing(tmp_path: Path, capsys: Captured) -> None:
    run = make_run(tmp_path, rows(1, 150))
    assert main(["twin", "--monitor", str(run), "--check"]) == 0
    assert "no slowdown" in capsys.readouterr().out


def test_a_run_on_a_gpu_is_held_against_its_prediction(tmp_path: Path, capsys: Captured) -> None:
    run = make_run(tmp_path, rows(1, 150), "NVIDIA H200", "h200")
    assert main(["twin", "--monitor", str(run), "--json", "--check"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["predicted"]["low_s"] < answer["predicted"]["step_s"] < 0.2
    assert [one["name"] for one in answer["findings"]] == ["off-prediction"]


def test_too_few_steps_tell_nothing_and_say_so(tmp_path: Path, capsys: Captured) -> None:
    run = make_run(tmp_path, rows(1, 20))
    assert main(["twin", "--monitor", str(run)]) == 0
    printed = capsys.readouterr()
    assert "not settled yet" in printed.out
    assert "too few steps" in printed.err


def test_a_run_is_followed_until_nobody_trains(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_monitor, "POLL_S", 0.01)
    monkeypatch.setattr(drift_monitor, "IDLE_TIMEOUT_S", 0.05)
    run = make_run(tmp_path, rows(1, 100))
    begun, go = threading.Event(), threading.Event()

    def trains() -> None:
        with lock_run_folder(run):
            begun.set()
            go.wait(10)
            with (run / "metrics.jsonl").open("a") as file:
                file.write(rows(101, 40, extra_s=0.04))
                file.flush()
            time.sleep(0.1)

    thread = threading.Thread(target=trains)
    thread.start()
    begun.wait(10)
    threading.Timer(0.1, go.set).start()
    assert main(["twin", "--monitor", str(run)]) == 0
    thread.join()
    printed = capsys.readouterr()
    assert "slower since step 101" in printed.err
    assert "step-drift" in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [(["gpt2"], "the run says what it trains"), (["--save", "out"], "--save")],
)
def test_what_a_run_already_says_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: Captured
) -> None:
    run = make_run(tmp_path, "")
    assert main(["twin", *words, "--monitor", str(run)]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert main(["twin", "--monitor", str(tmp_path)]) == 2
    assert "mw train" in capsys.readouterr().err
