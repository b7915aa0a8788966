"""`mw hang`: one screen, ranks for scripts, an exit code."""

import json
import pickle
from pathlib import Path

import pytest

from meshwright.cli import main
from tests.timeline.readers.small_dumps import STACK, dump, entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Dumps of four ranks, of which rank 2 stopped."""
    for rank in range(4):
        entries = [] if rank == 2 else [entry(7, frames=STACK)]
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump(entries)))
    return tmp_path


def test_the_screen_names_culprit_reason_source_and_next_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hang", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "rank 2" in printed
    assert "never enqueued all_reduce #7" in printed
    assert "/jobs/mine/model.py:12" in printed
    assert "next: py-spy dump on rank 2" in printed
    assert len(printed.splitlines()) < 40


def test_json_ranks_the_culprits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["hang", str(folder), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in answer["culprits"]] == [2]
    assert answer["blocked_operations"][0]["waiting_ranks"] == [0, 1, 3]


def test_quiet_prints_the_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["hang", *(str(path) for path in folder.iterdir()), "-q"])
    assert capsys.readouterr().out.split() == ["2"]


def test_dumps_without_a_hang_exit_with_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump([])))
    assert main(["hang", str(tmp_path)]) == 0
    assert "no hang" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert main(["hang", str(tmp_path / "none")]) == 2


def test_a_trace_is_sent_to_the_command_that_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.json").write_text('{"traceEvents": [], "deviceProperties": []}')
    assert main(["hang", str(tmp_path / "rank0.json")]) == 2
    assert "mw analyze reads it" in capsys.readouterr().err
