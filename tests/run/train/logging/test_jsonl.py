"""`metrics.jsonl`: rows that survive crashes and are there once."""

import json
import math
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.run.train.logging.jsonl import JsonlLogger, read_rows


def _write(path: Path, steps: range, resumed_at: int | None = None) -> None:
    output = JsonlLogger(path, resumed_at)
    for step in steps:
        output.write(step, {"loss": step / 2})
    output.close()


def _steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_each_row_is_one_json_object(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    _write(path, range(1, 3))
    assert path.read_text() == '{"step":1,"loss":0.5}\n{"step":2,"loss":1.0}\n'


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    output = JsonlLogger(tmp_path / "metrics.jsonl")
    output.write(1, {})
    assert _steps(tmp_path / "metrics.jsonl") == [1]
    output.close()


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    output = JsonlLogger(path)
    output.write(1, {"loss": math.nan, "norm": math.inf})
    output.close()

    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "step": 1,
        "loss": None,
        "norm": None,
    }


def test_a_resumed_run_cuts_off_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 9))
    _write(path, range(6, 11), resumed_at=5)
    assert _steps(path) == list(range(1, 11))
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_half_a_line_left_by_a_crash_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        rows = whole[:length].count(b"\n")
        assert _steps(path) == list(range(1, rows + 1))
        _write(path, range(rows + 1, 4), resumed_at=rows)
        assert path.read_bytes() == whole


def _damage(path: Path, number: int) -> bytes:
    """Spoil a line, counted from 1; return the file as it is then."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = b'{"step":3,"los\x00\x00\x00\n'
    path.write_bytes(b"".join(lines))
    return path.read_bytes()


def test_a_damaged_row_is_named_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 6))
    _damage(path, 3)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: line 3 is damaged"):
        assert _steps(path) == [1, 2, 4, 5]


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_resumed_run_names_a_damaged_row_and_leaves_it(number: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 9))
    kept = b"".join(_damage(path, number).splitlines(keepends=True)[:5])
    with pytest.warns(UserWarning, match=rf"metrics\.jsonl: line {number} is damaged"):
        JsonlLogger(path, resumed_at=5).close()
    assert path.read_bytes() == kept


def test_a_damaged_row_of_a_step_that_is_done_again_goes_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 9))
    _damage(path, 7)
    _write(path, range(6, 11), resumed_at=5)
    assert _steps(path) == list(range(1, 11))


def test_a_crash_while_cutting_leaves_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 9))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            JsonlLogger(path, resumed_at=4)
    assert _steps(path) == list(range(1, 9))
    _write(path, range(5, 6), resumed_at=4)
    assert _steps(path) == list(range(1, 6))


def test_a_file_that_needs_no_cut_is_not_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    before = path.stat().st_ino
    _write(path, range(4, 5), resumed_at=3)
    assert path.stat().st_ino == before


def test_a_run_that_resumes_without_a_file_starts_one(tmp_path: Path) -> None:
    _write(tmp_path / "metrics.jsonl", range(8, 9), resumed_at=7)
    assert _steps(tmp_path / "metrics.jsonl") == [8]


def test_a_new_run_does_not_mix_with_another(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    with pytest.raises(InputError, match="rows of another run"):
        JsonlLogger(path)
    assert _steps(path) == [1, 2, 3]
