"""Documents of text in files, however the files are cut."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.tokenization.text_files import (
    TextSlice,
    list_files,
    read_documents,
    split_file,
)


def read(path: Path, field: str = "text", most_bytes: int = 1 << 20) -> list[str | Problem]:
    return [text for part in split_file(path, most_bytes) for text in read_documents(part, field)]


def lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents))
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.integers(1, 200))
def test_json_lines_are_the_same_however_they_are_cut(
    tmp_path: Path, documents: list[str], most_bytes: int
) -> None:
    file = lines(tmp_path / "a.jsonl", documents)
    assert read(file, most_bytes=most_bytes) == documents


def test_gzipped_lines_and_texts_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"text": "one"}\n\n{"text": "two"}'))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    assert read(tmp_path / "a.json.gz") == ["one", "two"]
    assert read(tmp_path / "b.txt.gz") == ["three"]


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    documents = [f"document {n}" for n in range(50)]
    table = pa.table({"text": [*documents, None], "n": range(51)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    assert len(split_file(tmp_path / "a.parquet", 1)) == 8
    assert read(tmp_path / "a.parquet", most_bytes=1) == documents
    assert read(tmp_path / "a.parquet") == documents


def test_a_plain_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert read(tmp_path / "a.txt", most_bytes=2) == ["one\ntwo\n"]


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "here", "text": 3}\n')
    assert read(tmp_path / "a.jsonl", "content") == ["here"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"text": "broken', "byte 16"),
        (b'{"body": "x"}', "text"),
        (b'{"text": null}', "text"),
        (b'{"text": "\xff"}', "text"),
    ],
)
def test_a_damaged_line_is_told_and_the_next_is_read(
    tmp_path: Path, line: bytes, what: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    one, problem, two = read(tmp_path / "a.jsonl")
    assert (one, two) == ("one", "two")
    assert isinstance(problem, Problem)
    assert "byte 16" in problem.what
    assert what in problem.what


def test_a_gzip_that_breaks_off_is_told(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "one"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    *_, last = read(tmp_path / "a.jsonl.gz")
    assert isinstance(last, Problem)
    assert "to its end" in last.what


def test_text_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (problem,) = read(tmp_path / "a.txt")
    assert isinstance(problem, Problem)
    assert "byte 3" in problem.what


def test_parquet_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    (problem,) = read(tmp_path / "a.parquet")
    assert isinstance(problem, Problem)
    assert "body, n" in problem.fix
    (problem,) = read(tmp_path / "a.parquet", "n")
    assert isinstance(problem, Problem)
    assert "not text" in problem.what


def test_a_cut_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"] * 100}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(InputError, match="not a whole Parquet file"):
        split_file(tmp_path / "a.parquet", 100)
    (problem,) = read_documents(TextSlice(path=str(tmp_path / "a.parquet"), stop=1), "text")
    assert isinstance(problem, Problem)


def test_a_folder_stands_for_its_texts_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl.gz", "a/.hidden.txt", "c.bin", ".git/d.txt", "d.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in list_files([tmp_path])]
    assert found == ["a/z.jsonl.gz", "b.txt", "d.parquet"]


def test_every_path_that_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        list_files([tmp_path / "nowhere", tmp_path])
    assert len(refused.value.problems) == 2
