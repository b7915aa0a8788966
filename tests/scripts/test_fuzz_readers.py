"""Spoiled files of every format: a short run has no faults, and planted faults are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fuzzing.worker import WEIGHTS

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: str, timeout_s: float = 600) -> "subprocess.CompletedProcess[str]":
    """Run Python in the repository's root; audit hooks last as long as their process."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip


def _fuzz(count: int, seed: int) -> str:
    ran = _run("-m", "scripts.fuzz_readers", "--count", str(count), "--seed", str(seed),
               "--jobs", str(min(2, os.cpu_count() or 1)))  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_a_thousand_spoiled_files_end_in_an_answer_or_an_error() -> None:
    printed = _fuzz(1_000, seed=11)
    assert "1,000 cases" in printed
    for reader in WEIGHTS:
        (row,) = [line for line in printed.splitlines() if line[:22].strip() == reader]
        cases = [int(cell.replace(",", "")) for cell in row[22:].split()[:4]]
        assert cases[0] == sum(cases[1:]) > 0, row


@pytest.mark.slow
def test_fifty_thousand_spoiled_files_end_in_an_answer_or_an_error() -> None:
    _fuzz(50_000, seed=12)


PLANTED = {
    "raise KeyError(path)": "KeyError",
    "os.system('true')": "escaped: os.system",
    "eval('1 + 1')": "escaped: compile",
    "open('/dev/shm/fuzz-escaped', 'w')": "escaped: open",
    "sqlite3.connect(path.parent.parent / 'canary').execute('create table t (a)')": "the canary's",
    "while True: pass": "took more than 5 s",
    "bytearray(900 << 20)": "grew by",
    "bytearray(90 << 30)": "ran out of memory",
    "os.abort()": "the process died (exit code -6)",
}


def test_planted_faults_are_found_and_named() -> None:
    code = f"""
import os, sqlite3
from scripts.fuzzing import worker
from scripts.fuzz_readers import fuzz

bodies = {list(PLANTED)!r}
compiled = [compile(body, "planted", "exec") for body in bodies]
calls = []

def planted(path, rng):
    calls.append(path)
    exec(compiled[len(calls) - 1])

worker.TIME_LIMIT_S = 5.0  # a busy machine takes its time over 900 MB
worker.warm_up = lambda *given: None
for name in worker.READERS:
    worker.READERS[name] = planted
for fault in fuzz(len(bodies), 1, jobs=1, shared=None).faults:
    print(fault.number, fault.what.splitlines()[0])
"""
    ran = _run("-c", code)
    assert ran.returncode == 0, ran.stderr
    found = ran.stdout.splitlines()
    assert len(found) == len(PLANTED), ran.stdout
    for number, (line, what) in enumerate(zip(found, PLANTED.values(), strict=True)):
        assert line.startswith(f"{number} {what}"), line
