"""Lists of jobs from elsewhere, as they are ingested: zones, columns, conflicts, refusals."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.cli import main

pytest.importorskip("duckdb")
Captured = pytest.CaptureFixture[str]

HEAD = "job_id,gpu_num,state,submit_time,start_time,end_time\n"
MURI = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    "resource_time_0,priority\n"
)


def ingest(store: Path, *words: str | Path) -> int:
    return main(["fleet", "ingest", *map(str, words), "--store", str(store)])


def jobs_in(store: Path, capsys: Captured) -> dict[str, Any]:
    capsys.readouterr()
    assert ingest(store, "--json") == 0
    stored: dict[str, Any] = json.loads(capsys.readouterr().out)["stored"]["jobs"]
    return stored


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "muri"
    folder.mkdir()
    for place, name in enumerate(("trace3.csv", "trace4.csv"), start=1):
        rows = [
            f"{row},1,{row * place * 9000},100,vgg,8,{100_000 * place},0,{1000 * place},1,0"
            for row in range(10 * place)
        ]
        (folder / name).write_text(MURI + "\n".join(rows) + "\n")
    return folder / "trace3.csv", folder / "trace4.csv"


def test_two_files_with_the_same_names_of_jobs_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, capsys: Captured
) -> None:
    store = tmp_path / "store"
    assert ingest(store, *pair) == 2
    said = capsys.readouterr().err
    assert "10 of its 20 jobs" in said
    assert all(str(path) in said for path in pair)
    assert "--cluster NAME" in said
    assert jobs_in(store, capsys)["num_rows"] == 10


def test_conflicting_files_can_be_kept_apart_or_replace_one_another(
    pair: tuple[Path, Path], tmp_path: Path, capsys: Captured
) -> None:
    apart, folder, replaced = (tmp_path / name for name in ("apart", "folder", "replaced"))
    assert ingest(apart, pair[0], "--cluster", "three") == 0
    assert ingest(apart, pair[1], "--cluster", "four") == 0
    assert jobs_in(apart, capsys)["num_rows"] == 30
    assert ingest(folder, pair[0].parent) == 0
    assert jobs_in(folder, capsys)["num_rows"] == 30
    assert ingest(replaced, *pair, "--replace") == 0
    assert jobs_in(replaced, capsys)["num_rows"] == 20


def test_a_newer_version_of_a_file_is_read_and_replaces_its_own_jobs(
    pair: tuple[Path, Path], tmp_path: Path, capsys: Captured
) -> None:
    store, path = tmp_path / "store", pair[0]
    assert ingest(store, path) == 0
    assert ingest(store, path) == 0
    assert "nothing new" in capsys.readouterr().err
    path.write_text(path.read_text().replace("100000", "100400") + "99,1,0,100,v,8,100,0,1,1,0\n")
    assert ingest(store, path, "--quiet") == 0
    assert capsys.readouterr().out.split() == ["1", "10", "0"]


def test_a_later_copy_of_a_table_may_tell_how_jobs_went_on(
    tmp_path: Path, capsys: Captured
) -> None:
    head = "cluster,job,attempt,state,submit_s,start_s,end_s,gpus\n"
    first, later, other = (tmp_path / f"jobs-{name}.csv" for name in ("1", "2", "3"))
    first.write_text(f"{head}c,1,0,running,10,20,,8\n")
    later.write_text(f"{head}c,1,0,completed,10,20,90,8\n")
    other.write_text(f"{head}c,1,0,completed,500,520,590,8\n")
    store = tmp_path / "store"
    assert ingest(store, first, later) == 0
    assert ingest(store, other) == 2
    assert "1 of its 1 jobs (such as 1)" in capsys.readouterr().err


def test_a_list_without_zones_says_which_one_is_assumed(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "list.csv"
    row = "1,8,COMPLETED,2026-11-01 08:00:00,2026-11-01 08:00:00,2026-11-01 09:00:00\n"
    path.write_text(HEAD + row)
    assert ingest(tmp_path / "a", path) == 0
    assert "times without a zone are read as UTC" in capsys.readouterr().err
    assert jobs_in(tmp_path / "a", capsys)["first_s"] == 1793520000.0
    assert ingest(tmp_path / "b", path, "--option", "zone=Asia/Shanghai") == 0
    assert jobs_in(tmp_path / "b", capsys)["first_s"] == 1793520000.0 - 8 * 3600


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--option", "zome=UTC"], "did you mean zone?"),
        (["--option", "zone=Mars/Base"], "'Mars/Base' is no time zone"),
        (["--option", "zone=UTC", "--option", "zone=Asia/Tokyo"], "is given twice"),
        (["--option", "bad-rows=2"], "--option bad-rows"),
        (["--option", "time-unit=ms"], "add --column"),
        (["--column", "gpus=gpu_nun"], "did you mean gpu_num?"),
        (["--column", "gpu=gpu_num"], "or gpus?"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "list.csv"
    path.write_text(f"{HEAD}1,8,COMPLETED,1,2,3\n")
    assert ingest(tmp_path / "store", path, *words) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_list_is_refused_with_its_columns_and_read_once_they_are_mapped(
    tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "export.csv"
    path.write_text(
        "run;accelerators;who;began;took\n"
        "a;8;ann;2026-11-01T08:00:00+01:00;90\nb;4;bob;2026-11-01T08:30:00+01:00;30\n"
    )
    store = tmp_path / "store"
    assert ingest(store, path) == 2
    said = capsys.readouterr().err
    assert "has the columns run, accelerators, who, began, took" in said
    assert "--column gpus=NAME" in said
    mapped = {"gpus": "accelerators", "start": "began", "duration": "took", "job": "run"}
    words = [word for ours, theirs in mapped.items() for word in ("--column", f"{ours}={theirs}")]
    assert ingest(store, path, *words, "--column", "user=who", "--option", "time-unit=min") == 0
    stored = jobs_in(store, capsys)
    assert (stored["num_rows"], stored["first_s"]) == (2, 1793516400.0)
    assert stored["last_s"] == 1793516400.0 + 90 * 60


def test_a_list_with_usual_names_needs_one_hint(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "export.csv"
    path.write_text("id,num_gpus,submitted,started,finished\n1,8,100,200,300\n")
    assert ingest(tmp_path / "store", path) == 2
    assert "--column gpus=num_gpus reads it as a list of jobs" in capsys.readouterr().err
    assert ingest(tmp_path / "store", path, "--column", "gpus=num_gpus") == 0


def test_a_mapped_list_that_lacks_a_column_names_it(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "export.csv"
    path.write_text("id,num_gpus,submitted,gone\n1,8,100,300\n")
    assert ingest(tmp_path / "store", path, "--column", "gpus=num_gpus") == 2
    said = capsys.readouterr().err
    assert "has nothing for end_s or duration_s; its columns are id, num_gpus" in said
    words = ("--column", "gpus=num_gpus", "--column", "end_s=gone")
    assert ingest(tmp_path / "store", path, *words) == 0


def test_faulty_rows_are_told_with_their_lines_and_a_file_of_them_is_refused(
    tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "list.csv"
    rows = [f"{row},8,COMPLETED,{row},{row},{row + 60}" for row in range(40)]
    rows[4], rows[9] = "4,-8,COMPLETED,4,4,64", "9,8,COMPLETED,9,9"
    path.write_text(HEAD + "\n".join(rows) + "\n")
    assert ingest(tmp_path / "store", path) == 0
    said = capsys.readouterr().err
    assert "line 6, column gpu_num: '-8' is below 0" in said
    assert "1 rows of a wrong width left out (lines 11)" in said
    rows = [row.replace(",8,", ",-8,") if place % 2 else row for place, row in enumerate(rows)]
    path.write_text(HEAD + "\n".join(rows) + "\n")
    assert ingest(tmp_path / "other", path) == 2
    assert "cannot be right, so that its totals would be wrong" in capsys.readouterr().err
    assert ingest(tmp_path / "other", path, "--option", "bad-rows=0.9") == 0


def test_chronus_counts_in_minutes_and_has_deadlines(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "chronus.csv"
    head = "job_id,user,num_gpu,submit_time,duration,expect_time_list,best_effort\n"
    path.write_text(f"{head}0,u,4,100,60,30-90,0\n1,u,1,200,30,40,1\n")
    words = ["queue", "simulate", str(path), "--gpus", "4", "--policy", "edf", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpu_hours"] == 4.5
    assert (told["jobs_with_deadline"], told["missed_deadlines"]) == (1, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n\n\n", "is of no kind of telemetry"),
        ((HEAD + "1,8,C,1,2,3\n").encode("utf-16"), "save it as UTF-8"),
        (HEAD.encode() + b"j\xe9,8,C,1,2,3\n", "save it as UTF-8"),
        (HEAD.encode() + b"j\0,8,C,1,2,3\n", "NUL bytes"),
        (b"job_id,gpu_num," + HEAD.encode() + b"1,8,1,8,C,1,2,3\n", "twice among its columns"),
        (
            b'[{"jobid": "a", "status": "Pass", "attempts": [{"start_time": 5}]}]',
            "no list of Philly",
        ),
        (HEAD.encode() + b"1,1_000,C,1,2,3\n", "'1_000' is no number"),
        (HEAD.encode() + b'1,"1,024",C,1,2,3\n', "'1,024' is no number"),
        (HEAD.encode() + b"1,8,C,-3,-2,-1\n", "is no time in seconds since 1970"),
    ],
)
def test_files_that_nobody_should_send_are_refused_with_the_reason(
    content: bytes, said: str, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "list.csv"
    path.write_bytes(content)
    assert ingest(tmp_path / "store", path) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "this is a bug" not in printed.err


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + HEAD + "1,8,COMPLETED,1,2,3\n",
        (HEAD + "1,8,COMPLETED,1,2,3\n").replace("\n", "\r\n"),
        (HEAD + "1,8,COMPLETED,1,2,3\n").replace(",", "\t"),
        '"job_id","gpu_num","state","submit_time","start_time","end_time"\n'
        '"1","8","COM,PLETED\nx","1","2","3"\n',
    ],
)
def test_other_ways_to_write_the_same_list_are_read(
    text: str, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "list.csv"
    path.write_bytes(text.encode())
    assert ingest(tmp_path / "store", path) == 0
    assert jobs_in(tmp_path / "store", capsys)["last_s"] == 3


def test_tables_of_ours_with_repeated_columns_or_typed_times_are_no_crash(
    tmp_path: Path, capsys: Captured
) -> None:
    head = "cluster,job,attempt,gpus,submit_s,start_s,end_s"
    (tmp_path / "jobs.csv").write_text(f"{head},end_s\nc,1,0,8,1,2,3,4\n")
    assert ingest(tmp_path / "store", tmp_path / "jobs.csv") == 2
    assert "has end_s twice among its columns" in capsys.readouterr().err
    moment = pa.array([1_793_520_000], pa.timestamp("s", "UTC"))
    columns = {"cluster": ["c"], "job": ["1"], "attempt": [0], "submit_s": moment, "end_s": moment}
    pq.write_table(pa.table(columns), tmp_path / "jobs-1.parquet")
    assert ingest(tmp_path / "store", tmp_path / "jobs-1.parquet") == 0
    assert jobs_in(tmp_path / "store", capsys)["last_s"] == 1_793_520_000


def test_devices_and_pipes_are_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.csv")
    for name in ("zero.csv", "pipe.csv"):
        assert ingest(tmp_path / "store", tmp_path / name) == 2
        assert "is a device or a pipe" in capsys.readouterr().err
