"""NCCL's cost model beside the log that NCCL printed."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.predict.validation.collectives import compare_tuning_log, read_tuning_log
from validation.collectives.page import LOG


def test_every_entry_of_the_published_log_is_repeated() -> None:
    found = compare_tuning_log(read_tuning_log(LOG))
    assert len(found) == 70
    assert all(entry.exact for entry in found)


def test_entry_that_differs_is_named(tmp_path: Path) -> None:
    log = json.loads(LOG.read_text(encoding="utf-8"))
    log["_H100_AR_RING"]["2x8"][0][0] += 0.5
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log), encoding="utf-8")
    missed = [entry for entry in compare_tuning_log(read_tuning_log(path)) if not entry.exact]
    assert [(entry.part, entry.shape) for entry in missed] == [("_H100_AR_RING", "2x8")]
    assert missed[0].worst_us == pytest.approx(0.5, abs=0.11)


@pytest.mark.parametrize(
    "log",
    [
        [],
        {},
        {"_H100_AR_RING": 3},
        {"_H100_AR_RING": {"2x9": [[1, 2]]}},
        {"_H100_AR_RING": {"eight": [[1, 2]]}},
        {"_H100_AR_RING": {"2x8": [[1, 0]]}},
        {"_H100_AR_RING": {"2x8": "x"}},
    ],
)
def test_damaged_log_is_refused(tmp_path: Path, log: Any) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log), encoding="utf-8")
    with pytest.raises(InputError):
        compare_tuning_log(read_tuning_log(path))
