"""The folder of a run: who holds it, what it remembers, and that a claim leaves nothing behind."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.train.run_folder.run_folder import (
    SESSIONS_FILE,
    append_session,
    archive_run,
    find_last_logged_step,
    is_locked,
    lock_run_folder,
    read_last_layout,
)
from meshwright.run.train.run_folder.run_state import describe_layout_change
from meshwright.spec.layout import Layout


def test_a_claim_that_began_nothing_leaves_no_folders(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path / "runs" / "new"):
        assert (tmp_path / "runs" / "new").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_claim_keeps_what_was_there_and_what_was_begun(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with lock_run_folder(tmp_path / "runs" / "new"):
        (tmp_path / "runs" / "new" / "config.toml").touch()
    with lock_run_folder(tmp_path / "runs" / "other"):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["new"]


def test_a_folder_has_one_claim_at_a_time(tmp_path: Path) -> None:
    with (
        lock_run_folder(tmp_path),
        pytest.raises(InputError, match="another process"),
        lock_run_folder(tmp_path),
    ):
        pass


def test_others_see_whether_a_folder_is_in_use(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with lock_run_folder(tmp_path):
        (tmp_path / "config.toml").touch()
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path / "nowhere")


def test_every_session_leaves_a_row(tmp_path: Path) -> None:
    for after in (0, 7):
        append_session(tmp_path, after, torch.device("cpu"))
    rows = [json.loads(line) for line in (tmp_path / SESSIONS_FILE).read_text().splitlines()]
    assert [(row["after"], row["device"]) for row in rows] == [(0, "CPU"), (7, "CPU")]
    assert rows[0]["torch"] == str(torch.__version__)


def test_a_run_moved_aside_takes_the_first_free_name(tmp_path: Path) -> None:
    for name in ("run", "run.1"):
        (tmp_path / name).mkdir()
    assert archive_run(tmp_path / "run") == tmp_path / "run.2"


@pytest.mark.parametrize(
    ("rows", "step"),
    [("", 0), ('{"step": 3}\n{"step": 4}\n', 4), ('{"step": 3}\n{"ste', 3), ("nothing", 0)],
)
def test_the_last_whole_row_tells_the_step(rows: str, step: int, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert find_last_logged_step(tmp_path) == step


def test_another_layout_is_told_by_what_changed(tmp_path: Path) -> None:
    assert read_last_layout(tmp_path) is None
    (tmp_path / "config.toml").write_text("[layout]\ndp = 2\npp = 2\n")
    before = read_last_layout(tmp_path)
    assert before is not None
    assert describe_layout_change(before, Layout(dp=2, pp=2)) == ""
    now = Layout(pp=2, tp=2, sequence_parallel=True)
    assert (
        describe_layout_change(before, now) == "tp 1 → 2, sequence_parallel false → true, dp 2 → 1"
    )


def test_a_link_to_a_folder_that_is_not_there_makes_that_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    with lock_run_folder(tmp_path / "link"):
        assert (tmp_path / "disk" / "run").is_dir()
        with (
            pytest.raises(InputError, match="another process trains in this folder"),
            lock_run_folder(tmp_path / "disk" / "run"),
        ):
            pass
