"""Storage is measured in a folder that is as it was before."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.observe.bench import timing
from meshwright.observe.bench.bench_family import BenchTarget
from meshwright.observe.bench.io import storage
from meshwright.observe.bench.io.page_cache import detect_cache_bypass, detect_file_system
from meshwright.observe.bench.io.scratch_folder import create_scratch_folder

torch = pytest.importorskip("torch", reason="checkpoints are torch's")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FILE_BYTES", {"quick": 4 << 20, "full": 4 << 20})
    monkeypatch.setattr(timing, "BUDGET_S", 0.01)
    monkeypatch.setattr(storage, "FILES", {"quick": 5, "full": 5})


@pytest.mark.usefixtures("small")
def test_every_case_has_a_row_and_nothing_stays_behind(tmp_path: Path) -> None:
    family = storage.build_storage_family(tmp_path)
    cases = family.cases("full", False)
    assert family.run_all is not None
    found = list(family.run_all(cases, BenchTarget(torch.device("cpu")), time.monotonic() + 60))
    assert [row.case for row in found if not isinstance(row, tuple)] == list(cases)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FREE_SPACE_FACTOR", 1 << 40)
    family = storage.build_storage_family(tmp_path)
    assert family.run_all is not None
    [fault] = family.run_all(
        family.cases("quick", False)[:1], BenchTarget(torch.device("cpu")), time.monotonic() + 60
    )
    assert isinstance(fault, tuple)
    key, said = fault
    assert key.startswith("storage/write/")
    assert "are needed" in said


def test_time_that_is_up_ends_it(tmp_path: Path) -> None:
    family = storage.build_storage_family(tmp_path)
    assert family.run_all is not None
    cases = family.cases("quick", False)
    assert list(family.run_all(cases, BenchTarget(torch.device("cpu")), time.monotonic() - 1)) == []


def test_a_file_system_in_memory_has_no_disk_to_read(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or detect_file_system(memory) != "tmpfs":
        pytest.skip("there is no file system in memory here")
    assert detect_cache_bypass(memory) == "none"
    names = {case.name for case in storage.build_storage_family(memory).cases("full", False)}
    assert "read" not in names
    assert {"write", "read_cached"} <= names
    assert detect_cache_bypass(tmp_path) in ("direct", "dropped", "none")


KILLED = """
import os, sys
from pathlib import Path
from meshwright.observe.bench.io.scratch_folder import create_scratch_folder
with create_scratch_folder(Path(sys.argv[1])) as own:
    (own / "much").write_bytes(b"data")
    os._exit(9)
"""


def test_what_a_killed_bench_left_goes_and_a_running_ones_stays(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    [left] = tmp_path.iterdir()
    with create_scratch_folder(tmp_path) as first, create_scratch_folder(tmp_path) as second:
        assert not left.exists()
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert list(tmp_path.iterdir()) == []
