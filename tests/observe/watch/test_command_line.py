from pathlib import Path

import pytest

from meshwright.observe.watch.agent.recorder import recorder_settings
from meshwright.observe.watch.command_line import shown
from meshwright.observe.watch.environment import INJECT, environment
from meshwright.observe.watch.folder import Folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torchrun", "--nproc-per-node", "8", "train.py"], "torchrun --nproc-per-node 8 train.py"),
        (["x", "--token", "abc", "--lr", "1"], "x --token (left out) --lr 1"),
        (["x", "--hf-token=abc"], "x --hf-token=(left out)"),
        (["env", "WANDB_API_KEY=abc", "x"], "env WANDB_API_KEY=(left out) x"),
        (["x", "https://me:word@host/a"], "x https://host/a"),
        (["x", "hf_abcdefghijklmnopqrst"], "x (left out)"),
        (["x", "--tokens", "5"], "x --tokens 5"),
    ],
)
def test_secrets_are_not_shown(words: list[str], said: str) -> None:
    assert shown(words) == said


def test_hook_goes_before_the_path_of_the_job(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert environment({}, folder) == {
        "MESHWRIGHT_WATCH": str(tmp_path),
        "PYTHONPATH": str(INJECT),
        "TEARDOWN_CUPTI": "1",
        "MESHWRIGHT_WATCH_TEARDOWN": "1",
    }
    given = {"PYTHONPATH": "/a:/b", "MINE": "1", "TEARDOWN_CUPTI": "0"}
    assert environment(given, folder)["PYTHONPATH"] == f"{INJECT}:/a:/b"
    assert environment(given, folder)["TEARDOWN_CUPTI"] == "0"
    assert "MESHWRIGHT_WATCH_TEARDOWN" not in environment(given, folder)
    assert environment(given, folder)["MINE"] == "1"
    assert (INJECT / "sitecustomize.py").is_file()


def test_recorder_has_the_names_that_its_torch_knows(tmp_path: Path) -> None:
    new = recorder_settings({}, "2.13.0+cpu", str(tmp_path))
    old = recorder_settings({}, "2.7.1", str(tmp_path))
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
    assert recorder_settings(given, "2.13.0", str(tmp_path)) == {}


def test_no_pipe_where_the_folder_cannot_hold_one(tmp_path: Path) -> None:
    found = recorder_settings({}, "2.13.0", str(tmp_path / "not-there"))
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in found
