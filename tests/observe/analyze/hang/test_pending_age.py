"""A job that still moved when it was dumped shows no hang, whatever is unfinished in its dumps."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.observe.analyze.hang import DumpDiagnosis, diagnose_hang
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import read_flight_recorder
from tests.timeline.readers.small_dumps import dump, entry

S = 1_000_000_000
NOW = 1_700_000_000 * S


def _ended(number: int, took: int = S // 10) -> dict[str, Any]:
    at = NOW - 100 * S + number
    return entry(
        number, state="completed", time_created_ns=at, time_discovered_completed_ns=at + took
    )


def _write(folder: Path, ages_s: dict[int, list[float]], took: int = S // 10) -> Path:
    """Write dumps of ranks with unfinished operations of these ages, and 20 finished ones."""
    for rank, ages in ages_s.items():
        rows = [_ended(number, took) for number in range(20)]
        rows += [
            entry(20 + place, time_created_ns=NOW - round(age * S))
            for place, age in enumerate(ages)
        ]
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(dump(rows)))
        os.utime(path, ns=(NOW, NOW))
    return folder


def _verdict(folder: Path) -> DumpDiagnosis:
    return diagnose_hang(read_flight_recorder([folder]))


MOVING = {0: [0.3, 0.2], 1: [0.3, 0.2], 2: [0.3, 0.2], 3: []}
"""Rank 3 has not come to what the others are in."""


def test_a_job_that_moves_shows_no_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = _verdict(_write(tmp_path, MOVING))
    assert (verdict.culprits, verdict.blocked_operations) == ((), ())
    assert main(["hang", str(tmp_path)]) == 0
    assert "the job was moving" in capsys.readouterr().out


def test_the_same_dumps_written_minutes_later_show_one(tmp_path: Path) -> None:
    verdict = _verdict(_write(tmp_path, {r: [600 + age for age in a] for r, a in MOVING.items()}))
    assert [each.rank for each in verdict.culprits] == [3]
    assert verdict.pending_age is not None
    assert verdict.pending_age.pending_ns == pytest.approx(600.3 * S)


def test_what_usually_takes_long_may_wait_longer(tmp_path: Path) -> None:
    assert not _verdict(_write(tmp_path, {0: [30.0], 1: []}, took=20 * S)).culprits
    assert _verdict(_write(tmp_path, {0: [30.0], 1: []}, took=S)).culprits


def test_first_operations_that_took_minutes_do_not_excuse_a_wait_of_minutes(tmp_path: Path) -> None:
    assert _verdict(_write(tmp_path, {0: [120.0], 1: []}, took=300 * S)).culprits


def test_a_file_time_before_its_content_tells_nothing(tmp_path: Path) -> None:
    _write(tmp_path, MOVING)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(NOW - 3600 * S, NOW - 3600 * S))
    verdict = _verdict(tmp_path)
    assert verdict.pending_age is None
    assert [each.rank for each in verdict.culprits] == [3]


def test_ranks_that_disagree_are_named_though_the_job_moves(tmp_path: Path) -> None:
    _write(tmp_path, {0: [0.2], 1: [0.2], 2: [0.2], 3: []})
    odd = [entry(20, time_created_ns=NOW - S // 5, input_sizes=[[9]])]
    path = tmp_path / "nccl_trace_rank_3"
    path.write_bytes(pickle.dumps(dump([*(_ended(number) for number in range(20)), *odd])))
    os.utime(path, ns=(NOW, NOW))
    assert {each.rank: each.kind for each in _verdict(tmp_path).culprits} == {3: "mismatch"}
