"""What is wrong with a CSV file is told by line, column and value, with what would be right."""

import gzip
from pathlib import Path

import pytest

from meshwright.fleet.sources.csv_errors import find_csv_errors
from meshwright.fleet.tables import TABLE_SCHEMAS

HEAD = "job,attempt,start_s,time_limit_s,gpus,interactive,nodes\n"
FINE = "a,0,12,3600,0.5,true,n1;n2\n\nb,1,,NaN,, false ,\n"


def told(tmp_path: Path, text: bytes, name: str = "jobs.csv") -> list[str]:
    file = tmp_path / name
    file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    found = find_csv_errors(file, TABLE_SCHEMAS["jobs"], ["job", "attempt"])
    return [str(one).removeprefix(f"{file} ") for one in found]


@pytest.mark.parametrize("name", ["jobs.csv", "jobs.csv.gz"])
def test_nothing_is_wrong_with_a_file_that_can_be_read(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, (HEAD + FINE).encode(), name) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"c,0,01/11/2026,,,,", "line 5, column start_s: '01/11/2026' is not a time in seconds "
         "(fix: write seconds since 1970 in UTC, as 1767225600, or 2026-01-01T00:00:00Z, "
         "or nothing where it is unknown)"),
        (b"c,0,,1h,,,", "line 5, column time_limit_s: '1h' is not a number of seconds"),
        (b"c,0,,,8 GPUs,,", "line 5, column gpus: '8 GPUs' is not a number"),
        (b"c,1.5,,,,,", "line 5, column attempt: '1.5' is not a whole number"),
        (b"c,,,,,,", "line 5, column attempt: is empty, but rows are told apart by it"),
        (b"c,0,,,,maybe,", "line 5, column interactive: 'maybe' is not true or false"),
        (b"\xff,0,,,,,", "line 5, column job: b'\\xff' is not UTF-8"),
        (b"c,0", "line 5: has 2 fields, but the first line names 7"),
    ],
)  # fmt: skip
def test_a_bad_value_is_told_with_its_line(tmp_path: Path, line: bytes, expected: str) -> None:
    (found,) = told(tmp_path, (HEAD + FINE).encode() + line + b"\n")
    assert found.startswith(expected)


def test_several_are_told_at_once_and_not_all_of_thousands(tmp_path: Path) -> None:
    assert len(told(tmp_path, (HEAD + "c,0,x,,,,\n" * 2).encode())) == 2
    assert len(told(tmp_path, (HEAD + "c,0,x,,,,\n" * 5000).encode())) == 5


def test_a_line_is_where_its_record_begins(tmp_path: Path) -> None:
    (found,) = told(tmp_path, (HEAD + '"two\nlines",0,,,,,\n"two\nlines",0,x,,,,\n').encode())
    assert found.startswith("line 4, ")
