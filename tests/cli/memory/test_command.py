"""`mw memory`: one screen, data for scripts, an exit code."""

import json
import pickle
from pathlib import Path

import pytest

from meshwright.cli import main
from tests.timeline.readers.small_dumps import STACK, event, snapshot


def _file(folder: Path, *, oom: bool) -> str:
    events = [event("alloc", 0, 1024)]
    if oom:
        events.append({"action": "oom", "size": 3500, "device_free": 600, "frames": STACK})
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(events, active=1024)))
    return str(path)


def test_the_screen_shows_sums_peak_and_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", _file(tmp_path, oom=False)]) == 0
    printed = capsys.readouterr().out
    assert "activations" in printed
    assert "/jobs/mine/model.py:12 forward" in printed
    assert len(printed.splitlines()) < 40


def test_an_out_of_memory_error_is_explained_and_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", _file(tmp_path, oom=True)]) == 1
    printed = capsys.readouterr().out
    assert "fragmentation failed it" in printed
    assert "expandable_segments:True" in printed


def test_json_holds_sums_and_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["memory", _file(tmp_path, oom=False), "--json"])
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["peak_live_bytes"] == 1024
    assert device["timeline"] == [{"time_us": 0, "live_bytes": 1024}]


def test_a_malicious_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert main(["memory", str(path)]) == 2
    assert "refused" in capsys.readouterr().err


def test_a_trace_is_sent_to_the_command_that_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.json").write_text('{"traceEvents": [], "deviceProperties": []}')
    assert main(["memory", str(tmp_path / "rank0.json")]) == 2
    assert "mw analyze reads it" in capsys.readouterr().err
