"""A writer is killed for real, at every point and any moment: no row is lost, none counts twice."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from meshwright.fleet.store import FleetStore
from tests.fleet.store.killed_writer import batch

pytest.importorskip("duckdb")

WRITER = Path(__file__).with_name("killed_writer.py")


def write(folder: Path, point: str = "never", nth: int = 0) -> int:
    line = [sys.executable, str(WRITER), str(folder), point, str(nth)]
    return subprocess.run(line, timeout=120, check=False, stdout=subprocess.DEVNULL).returncode


def totals(folder: Path) -> dict[str, Any]:
    with FleetStore(folder) as store:
        windows = store.read_table("gpu_rollups_5m", ["count", "gpu_util_mean", "gpu_util_count"])
        weighed = pc.multiply(windows["gpu_util_mean"], windows["gpu_util_count"])
        samples = store.read_table("gpu_samples", ["node", "gpu", "time_s", "gpu_util"])
        order = [("node", "ascending"), ("gpu", "ascending"), ("time_s", "ascending")]
        return {
            "gpu_samples": samples.sort_by(order).to_pylist(),
            "jobs": store.read_table("jobs", ["job", "end_s"]).sort_by("job").to_pylist(),
            "gpu_rollups_5m": (windows.num_rows, pc.sum(windows["count"]).as_py()),
            "util": pytest.approx(pc.sum(weighed).as_py()),
            "cursor": store.get_cursor("batches"),
        }


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("unharmed") / "store"
    assert write(folder) == 0
    return totals(folder)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["half", "unlisted", "committing", "listed"])
@pytest.mark.parametrize("nth", [1, 8])
def test_killed_at_a_point_and_run_again(
    tmp_path: Path, unharmed: dict[str, Any], point: str, nth: int
) -> None:
    folder = tmp_path / "store"
    assert write(folder, point, nth) == -signal.SIGKILL
    assert write(folder) == 0
    assert totals(folder) == unharmed


@pytest.mark.slow
def test_killed_at_any_moment_again_and_again(tmp_path: Path, unharmed: dict[str, Any]) -> None:
    folder, draw, killed = tmp_path / "store", random.Random(3), 0
    for _ in range(6):
        line = [sys.executable, str(WRITER), str(folder), "never", "0"]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(draw.random() * 0.1)
            child.kill()
        killed += child.returncode == -signal.SIGKILL
    assert killed >= 3
    assert write(folder) == 0
    assert totals(folder) == unharmed


def test_files_of_a_killed_writer_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with FleetStore(folder, create=True) as store:
        orphan = folder / "gpu_samples" / "cluster=east" / "day=2026-01-01" / "0.parquet"
        orphan.parent.mkdir(parents=True)
        orphan.write_bytes(b"PAR1 and no more")
        assert store.read_table("gpu_samples").num_rows == 0
        for table, rows in batch(0):
            store.put(table, rows)
    assert not orphan.exists()
