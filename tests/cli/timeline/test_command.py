"""`mw timeline`: a recorded run shown, opened in Perfetto and mended."""

import errno
import gzip
import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.timeline import TimelineWriter

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(2):
        with TimelineWriter(tmp_path / "timeline", rank=rank) as timeline:
            timeline.span("step", 0, 1_000_000, kind="compute")
            timeline.span("reduce", 1_000_000, 500_000, kind="communication")
    return tmp_path / "timeline"


def test_show_sums_each_rank_by_kind(folder: Path, capsys: Captured) -> None:
    assert main(["timeline", "show", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["spans"] == 4
    assert shown["ranks"] == [0, 1]
    assert {"rank": 1, "kind": "communication", "spans": 1, "total_s": 0.0005} in shown["kinds"]


def test_the_folder_of_a_run_stands_for_its_timeline(folder: Path, capsys: Captured) -> None:
    assert main(["timeline", "show", str(folder.parent), "-q"]) == 0
    assert capsys.readouterr().out == "4\n"


def test_a_run_without_a_timeline_is_told_how_to_record_one(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert main(["timeline", "show", str(tmp_path)]) == 2
    assert "is a run without a timeline" in capsys.readouterr().err


def test_perfetto_writes_a_trace(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "trace.json.gz"
    assert main(["timeline", "perfetto", str(folder), str(out)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4


def test_perfetto_refuses_other_endings(folder: Path, capsys: Captured) -> None:
    assert main(["timeline", "perfetto", str(folder), "trace.pb"]) == 2
    assert "trace.pb.json.gz" in capsys.readouterr().err


def test_a_damaged_rank_is_named_and_the_rest_shown(folder: Path, capsys: Captured) -> None:
    damaged = folder / "rank-00001.parquet"
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert main(["timeline", "show", str(folder)]) == 1
    printed = capsys.readouterr()
    assert "rank-00001.parquet" in printed.err
    assert f"mw timeline repair {folder}" in printed.err
    assert "compute" in printed.out


def test_repair_says_when_there_is_nothing_to_do(folder: Path, capsys: Captured) -> None:
    assert main(["timeline", "repair", str(folder)]) == 0
    assert "nothing to repair" in capsys.readouterr().out


def test_a_folder_that_may_not_be_read_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert main(["timeline", "show", str(tmp_path)]) == 2
    assert "cannot read: Permission denied" in capsys.readouterr().err
