"""The search for hostile files: every target has seeds, and a planted fault is found and kept."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from scripts.fuzzing.coverage_run import FaultLog, check_input
from scripts.fuzzing.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_reads_its_own_seeds(name: str, tmp_path: Path) -> None:
    module = import_module(TARGETS[name].module)
    seeds = list(module.SEEDS[name](tmp_path))
    assert seeds
    log = FaultLog(tmp_path, name)
    for data in seeds:
        check_input(module.READERS[name], tmp_path / "case_rank_0", data, log)
    assert not log.seen


def test_a_fault_is_kept_once_with_its_input(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        raise KeyError(path)

    log = FaultLog(tmp_path, "planted")
    for data in (b"one", b"two"):
        check_input(read, tmp_path / "case", data, log)
    assert len(log.seen) == 1
    (kept,) = [path for path in tmp_path.glob("planted-*") if path.suffix != ".txt"]
    assert kept.read_bytes() == b"one"
    assert "KeyError" in kept.with_suffix(".txt").read_text()


@pytest.mark.slow
def test_a_short_search_reaches_branches_and_has_no_faults(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="needs atheris (pip install atheris)")
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.fuzz_coverage", "xml", "numpy_pickle", "--seconds", "20",
         "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=os.environ,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count(" 0 faults") == 2
