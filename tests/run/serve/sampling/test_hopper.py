"""The kernels of sampling compile for Hopper and spill nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spilling() -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.run.serve.sampling.hopper"],
        env=surroundings | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    reports = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [report["name"] for report in reports if report["stack_bytes"]] == []
    # Logits, all that is much, move 16 bytes at a time.
    reading = [report for report in reports if report["name"].startswith(("choose", "floors"))]
    assert len(reading) == 4
    assert all(16 in report["bytes_of_accesses"] for report in reading)
