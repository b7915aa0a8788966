"""Rows of measured collectives are read in both shapes; a file that holds none is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.predict.validation.collectives import (
    pack_sweeps,
    read_sweep_rows,
    score_collectives,
)

ROWS: list[dict[str, Any]] = [
    {"system": "a", "source": "https://example.org/a#L1", "gpu": "H100", "size_bytes": 8},
    {"system": "a", "source": "https://example.org/a#L2", "gpu": "H100", "size_bytes": 9},
    {"system": "b", "source": "https://example.org/b", "gpu": "H100", "ep_bandwidth_GBps": 3.5},
]


def test_packed_rows_unpack_to_themselves(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(pack_sweeps(ROWS), encoding="utf-8")
    again = read_sweep_rows(path)
    for row, kept in zip(ROWS, again, strict=True):
        assert {name: kept.get(name) for name in row if name != "source"} == {
            name: value for name, value in row.items() if name != "source"
        }
    assert len(json.loads(path.read_text(encoding="utf-8"))["sweeps"]) == 2


@pytest.mark.parametrize("text", ["{", '{"rows": 1}', "3", "[" * 100_000])
def test_file_that_holds_no_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"bad\.json"):
        read_sweep_rows(path)


@pytest.mark.parametrize(
    "text",
    [
        "[1, null, []]",
        '{"sweeps": [1, {"rows": 2}, {"rows": [3]}]}',
        '{"sweeps": [{"rows": [[]]}]}',
    ],
)
def test_entries_that_are_no_rows_are_kept_and_say_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text, encoding="utf-8")
    rows = read_sweep_rows(path)
    assert rows
    assert all(item.skipped for item in score_collectives(rows))
