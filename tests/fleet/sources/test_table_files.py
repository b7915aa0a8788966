"""Files laid out as our tables: named by them, read once, refused where they cannot be right."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.errors import InputError
from meshwright.fleet.sources.source import SourceOptions, TelemetrySource, make_rows
from meshwright.fleet.sources.source_registry import open_source

HEAD = "job,attempt,submit_s,end_s,nodes,gpus"
ASKED = SourceOptions(cluster="east")


def read(source: TelemetrySource, cursor: str | None = None) -> tuple[list[pa.Table], str | None]:
    batches = list(source.read_batches(cursor))
    moved = [batch.cursor for batch in batches if batch.cursor]
    return [batch.rows for batch in batches if batch.rows.num_rows], moved[-1] if moved else cursor


def test_csv_has_lists_blanks_and_a_time_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"{HEAD}\n71_3,0,5,,n1;n2,8\n72,1,6,9,,0.5\n")
    (rows,), _ = read(open_source(str(path), ASKED))
    first, second = rows.to_pylist()
    assert (first["job"], first["nodes"], first["end_s"]) == ("71_3", ["n1", "n2"], None)
    assert (second["attempt"], second["nodes"], second["gpus"]) == (1, None, 0.5)
    assert first["cluster"] == "east"
    assert first["seen_s"] == path.stat().st_mtime


def test_a_folder_is_read_once_and_again_where_a_file_changed(tmp_path: Path) -> None:
    samples = {
        "cluster": ["west"], "node": ["n1"], "gpu": [0], "time_s": [30.0], "gpu_util": [0.5],
    }  # fmt: skip
    pq.write_table(make_rows("gpu_samples", samples), tmp_path / "gpu_samples-1.parquet")
    (tmp_path / "jobs.csv.gz").write_bytes(gzip.compress(f"{HEAD}\n1,0,5,,,8\n".encode()))
    (tmp_path / "README.md").write_text("not a table")
    tables, cursor = read(open_source(str(tmp_path), ASKED))
    assert sorted(rows["cluster"][0].as_py() for rows in tables) == ["east", "west"]
    assert read(open_source(str(tmp_path), ASKED), cursor) == ([], cursor)
    (tmp_path / "jobs.csv.gz").write_bytes(gzip.compress(f"{HEAD}\n1,0,5,7,,8\n".encode()))
    (rows,), _ = read(open_source(str(tmp_path), ASKED), cursor)
    assert rows["end_s"].to_pylist() == [7.0]


def test_only_the_time_that_is_asked_for_is_given(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"{HEAD}\n1,0,5,9,,8\n2,0,5,,,8\n3,0,50,60,,8\n")
    asked = ASKED._replace(since_s=10.0, until_s=40.0)
    (rows,), _ = read(open_source(str(path), asked))
    assert rows["job"].to_pylist() == ["2"]


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("jobs.csv", "job,submit_s\n1,5\n", "lacks attempt"),
        ("jobs.csv", "job,attempt,colour\n1,0,red\n", "colour: is no column of jobs"),
        ("jobs.csv", "job,attempt,submit_s\n1,0,yesterday\n", "yesterday"),
        ("work.csv", "job,attempt\n1,0\n", "named after a table"),
    ],
)
def test_what_cannot_be_a_table_is_refused(
    tmp_path: Path, name: str, text: str, match: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=match):
        read(open_source(str(tmp_path / name), ASKED, "tables"))


def test_a_cluster_without_a_name_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(f"{HEAD}\n1,0,5,,,8\n")
    with pytest.raises(InputError, match="--cluster"):
        read(open_source(str(tmp_path), SourceOptions()))


def test_percentages_are_refused_where_shares_are_meant(tmp_path: Path) -> None:
    file = tmp_path / "gpu_samples.csv"
    file.write_text("cluster,node,gpu,time_s,gpu_util\neast,n1,0,10,95\n")
    with pytest.raises(InputError, match="gpu_util: holds 95, and is a share"):
        read(open_source(str(file), SourceOptions()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("jobs.csv", "cluster,job,attempt,user\neast,1,0,ann\n"),
        ("sacct.txt", "JobID|User|State|Start\n1|ann|RUNNING|2026-11-01T00:00:00\n"),
    ],
)
def test_files_of_a_folder_that_are_not_read_are_named(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "README.md").write_text("of people")

    def list_notes() -> list[str]:
        batches = open_source(str(tmp_path), SourceOptions()).read_batches()
        notes = [note for batch in batches for note in batch.notes]
        return [note for note in notes if "read as UTC" not in note]

    assert not list_notes()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    notes = list_notes()
    assert len(notes) == 1
    assert notes[0].startswith("left out, ")
    assert notes[0].endswith(": other.csv")
