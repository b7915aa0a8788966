"""Kernels compile for Hopper, keep to their registers, and move 16 bytes at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

ROOT = Path(__file__).parents[3]
REGISTERS = 65536
"""Of a multiprocessor of Hopper, for all threads that it runs at a time."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.run.kernels.hopper"],
        env=surroundings | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    reports = [json.loads(line) for line in finished.stdout.splitlines()]
    return {report["name"]: report for report in reports}


def test_no_kernel_spills_registers(found: dict[str, dict[str, Any]]) -> None:
    # Attention over pages fills the registers, and may lay some aside outside of its loop.
    room = {name: 64 if name.startswith("paged attention") else 0 for name in found}
    assert {name for name, report in found.items() if report["stack_bytes"] > room[name]} == set()


def test_sixteen_warps_of_every_kernel_fit_on_a_multiprocessor(
    found: dict[str, dict[str, Any]],
) -> None:
    # Of the 64 that Hopper runs; with fewer the memory would be left waiting.
    most = REGISTERS // (16 * 32)
    # These ask for their bytes tiles ahead, with few warps that hold much.
    few = ("paged attention", "stream_linear")
    names = {name for name in found if not name.startswith(few)}
    assert {name for name in names if found[name]["registers"] > most} == set()


def test_bulk_of_a_kernels_bytes_moves_sixteen_at_a_time(
    found: dict[str, dict[str, Any]],
) -> None:
    for name, report in found.items():
        # The second path of the gradient norm and of updates, element by element, is for the ends
        # of tensors, and the embedding's single loads are numbers of rows, of which each brings a
        # whole row.
        # Attention over pages and streamed products have their bulk copied to shared memory, which
        # is not counted here.
        copied = ("paged attention", "stream_linear")
        others = ("gradient_norm", "adamw", "embedding backward", *copied)
        if not name.startswith(others):
            sizes = report["bytes_of_accesses"]
            assert sum(size for size in sizes if size == 16) >= 2 / 3 * sum(sizes), name
