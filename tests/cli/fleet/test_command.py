"""`mw fleet`: telemetry read from files into a store, told in tables and in JSON."""

import json
import stat
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.cli.flags.time_range import parse_time
from meshwright.errors import InputError
from meshwright.fleet.time_format import format_range

pytest.importorskip("duckdb")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "jobs.csv").write_text("job,attempt,submit_s,end_s,gpus\n1,0,5,,8\n2,0,6,9,1\n")
    lines = [f"n1,{gpu},{30 * step},{step % 2}" for gpu in range(2) for step in range(20)]
    (folder / "gpu_samples.csv").write_text("node,gpu,time_s,gpu_util\n" + "\n".join(lines))
    return folder


def read(store: Path, *words: str) -> int:
    return main(["fleet", "ingest", *words, "--store", str(store)])


def test_files_are_read_once(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert read(store, str(files), "--cluster", "east", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sources"][0]["tables"]["gpu_samples"]["new"] == 40
    assert told["stored"]["gpu_rollups_5m"]["num_rows"] == 4
    assert told["clusters"] == ["east"]
    assert read(store, str(files), "--cluster", "east", "--quiet") == 0
    assert capsys.readouterr().out.strip() == "0 0 0"
    assert read(store, str(files), "--cluster", "east", "--from-start", "--quiet") == 0
    assert capsys.readouterr().out.strip() == "0 0 42"
    assert read(store, str(files), "--cluster", "east") == 0
    assert "nothing new; --from-start reads it from the beginning" in capsys.readouterr().err


def test_without_a_source_it_says_what_is_held(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert read(store) == 2
    read(store, str(files), "--cluster", "east")
    capsys.readouterr()
    assert read(store, "--keep-samples", "1") == 0
    printed = capsys.readouterr().out
    assert "gpu_rollups_5m" in printed
    assert "Let go" in printed
    assert "40 rows" in printed


def test_a_reading_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text("job,attempt,gpus\n1,0,many\n")
    before = sorted(tmp_path.rglob("*"))
    assert read(tmp_path / "a" / "store", str(tmp_path / "jobs.csv"), "--cluster", "east") == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_cannot_be_made_is_told_before_anything_is_read(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text("a file")
    assert read(tmp_path / "a" / "store", str(files), "--cluster", "east") == 2
    assert f"{tmp_path / 'a'} is a file" in capsys.readouterr().err


def test_it_goes_on_reading_and_tells_what_fails(
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs, turns = files / "jobs.csv", iter(("job,attempt\n1,zero\n", "job,attempt\n9,0\n"))

    def between(_: float) -> None:
        text = next(turns, None)
        if text is None:
            raise KeyboardInterrupt
        jobs.write_text(text)

    monkeypatch.setattr("meshwright.cli.fleet.ingest.time.sleep", between)
    store = tmp_path / "store"
    assert read(store, str(jobs), "--cluster", "east", "--every", "5min") == 130
    first, second, third = capsys.readouterr().err.splitlines()[:3]
    assert "2 new, 0 changed, 0 known" in first
    assert "zero" in second
    assert "1 new, 0 changed, 0 known" in third


def test_a_token_is_nowhere_in_the_store_nor_on_the_screen(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, token = tmp_path / "store", tmp_path / "token"
    token.write_text("s3cret-token\n")
    assert read(store, str(files), "--cluster", "east", "--token-file", str(token), "--json") == 0
    captured = capsys.readouterr()
    assert "s3cret" not in captured.out + captured.err
    for path in store.rglob("*"):
        if path.is_file():
            assert b"s3cret" not in path.read_bytes()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.csv"], "no such file"),
        (["--every", "5min"], "no source"),
        (["FILES", "--option", "colour"], "NAME=VALUE"),
        (["FILES", "--since", "1d", "--until", "2d"], "not before"),
        (["FILES", "--step", "0s"], "no distance"),
        (["FILES", "--every", "1s"], "too often"),
        (["FILES", "--kind", "tabels"], "tables"),
        (["FILES", "--token-file", "nowhere"], "cannot read"),
        (["FILES"], "--cluster"),
        (["EMPTY"], "the folder is empty"),
    ],
)
def test_mistakes_are_told_with_their_mending(
    words: list[str],
    told: str,
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    places = {"FILES": str(files), "EMPTY": str(empty)}
    given = [places.get(word, word) for word in words]
    assert read(tmp_path / "store", *given) == 2
    assert told in capsys.readouterr().err


def test_a_list_of_nodes_tells_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nodes.csv").write_text("cluster,node,since_s,state,gpus\neast,n1,0,up,8\n")
    store = tmp_path / "store"
    assert read(store, str(tmp_path / "nodes.csv")) == 0
    assert "1970" not in capsys.readouterr().out
    assert main(["fleet", "report", "--store", str(store)]) == 2
    assert "nothing that tells a time" in capsys.readouterr().err


def test_times_of_a_trace_without_dates_count_from_its_beginning() -> None:
    assert format_range(86_400.0, 90_060.0) == "day 1 to day 1 01:01 of the trace"
    assert format_range(1_767_225_600.0, 1_767_229_260.0) == "2026-01-01 to 2026-01-01 01:01 UTC"
    assert parse_time("day 2", "--since", 0.0) == 172_800.0


def test_moments_are_ago_or_dates() -> None:
    assert parse_time("2d", "", 1_000_000.0) == 1_000_000.0 - 2 * 86_400
    assert parse_time("1970-01-02", "", 0.0) == 86_400
    assert parse_time("1970-01-02T01:00+01:00", "", 0.0) == 86_400
    with pytest.raises(InputError, match="no date"):
        parse_time("1970-13-02", "", 0.0)
