from pathlib import Path

import pytest

from meshwright.observe.watch.agent.flight_recorder_env import build_flight_recorder_env
from meshwright.observe.watch.job_process import INJECT_FOLDER, build_environment, redact_command
from meshwright.observe.watch.watch_folder import WatchFolder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torchrun", "--nproc-per-node", "8", "train.py"], "torchrun --nproc-per-node 8 train.py"),
        (["x", "--token", "abc", "--lr", "1"], "x --token (redacted) --lr 1"),
        (["x", "--hf-token=abc"], "x --hf-token=(redacted)"),
        (["env", "WANDB_API_KEY=abc", "x"], "env WANDB_API_KEY=(redacted) x"),
        (["x", "https://me:word@host/a"], "x https://host/a"),
        (["x", "hf_abcdefghijklmnopqrst"], "x (redacted)"),
        (["x", "--tokens", "5"], "x --tokens 5"),
    ],
)
def test_secrets_are_not_shown(words: list[str], said: str) -> None:
    assert redact_command(words) == said


def test_hook_goes_before_the_path_of_the_job(tmp_path: Path) -> None:
    folder = WatchFolder(tmp_path)
    assert build_environment({}, folder) == {
        "MESHWRIGHT_WATCH": str(tmp_path),
        "PYTHONPATH": str(INJECT_FOLDER),
        "TEARDOWN_CUPTI": "1",
        "MESHWRIGHT_WATCH_TEARDOWN": "1",
    }
    given = {"PYTHONPATH": "/a:/b", "MINE": "1", "TEARDOWN_CUPTI": "0"}
    assert build_environment(given, folder)["PYTHONPATH"] == f"{INJECT_FOLDER}:/a:/b"
    assert build_environment(given, folder)["TEARDOWN_CUPTI"] == "0"
    assert "MESHWRIGHT_WATCH_TEARDOWN" not in build_environment(given, folder)
    assert build_environment(given, folder)["MINE"] == "1"
    assert (INJECT_FOLDER / "sitecustomize.py").is_file()


def test_recorder_has_the_names_that_its_torch_knows(tmp_path: Path) -> None:
    new = build_flight_recorder_env({}, "2.13.0+cpu", str(tmp_path))
    old = build_flight_recorder_env({}, "2.7.1", str(tmp_path))
    assert new["TORCH_FR_BUFFER_SIZE"] == old["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert not new.keys() & {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}


def test_what_the_job_set_stays(tmp_path: Path) -> None:
    given = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "9",
        "TORCH_FR_DUMP_TEMP_FILE": "/mine",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/pipe",
        "KINETO_LOG_LEVEL": "0",
    }
    assert build_flight_recorder_env(given, "2.13.0", str(tmp_path)) == {}


def test_no_pipe_where_the_folder_cannot_hold_one(tmp_path: Path) -> None:
    found = build_flight_recorder_env({}, "2.13.0", str(tmp_path / "not-there"))
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in found
