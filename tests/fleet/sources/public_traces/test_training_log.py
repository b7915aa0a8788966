"""Logs of training runs."""

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from meshwright.fleet.sources.public_traces.public_trace_source import open_source
from meshwright.fleet.sources.source import SourceOptions

_DAY = "2024-04-29 06:"
LOG = f"""Defaulted container "pytorch" out of: pytorch
[{_DAY}15:00,000] [INFO] Setting ds_accelerator to cuda (auto detect)
[{_DAY}15:10,000] [INFO] train_batch_size: 1, world_size: 16, pipeline: 1
[{_DAY}17:00,000] [INFO] loss: 1.1, epoch: 0.0, iter: 1/4,  00:50
[{_DAY}17:10,000] [INFO] loss: 1.1, epoch: 0.0, iter: 2/4,  00:50
[{_DAY}17:10,500] [INFO] Saving model checkpoint to outputs
[{_DAY}17:50,000] [INFO] loss: 1.1, epoch: 0.0, iter: 3/4,  00:50
[{_DAY}18:00,000] [INFO] loss: 1.1, epoch: 0.0, iter: 4/4,  00:50
[{_DAY}18:01,000] [INFO] Saving model checkpoint to outputs
[{_DAY}18:30,000] [INFO] Training completed!
"""
PODS = """llama-5b-master      10.0.0.1    gpu-31    2024-04-29T06:14:00Z
llama-5b-worker-1    10.0.0.2    gpu-68    2024-04-29T06:14:10Z
"""


def read(where: Path) -> dict[str, pa.Table]:
    return {
        batch.table: batch.rows for batch in open_source(str(where), SourceOptions()).read_batches()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "llama-5b-master.log").write_text(LOG, encoding="utf-8")
    (tmp_path / "llama-5b-worker-1.log").write_text(LOG, encoding="utf-8")
    return tmp_path


def test_a_run_is_one_job(run: Path) -> None:
    (job,) = read(run)["jobs"].to_pylist()
    assert (job["job"], job["gpus"], job["state"]) == ("llama-5b", 16, "completed")
    assert job["end_s"] - job["start_s"] == 210


def test_pods_tell_when_it_began_and_where(run: Path) -> None:
    (run / "pod-node-starttime.log").write_text(PODS, encoding="utf-8")
    (job,) = read(run)["jobs"].to_pylist()
    assert job["nodes"] == ["gpu-31", "gpu-68"]
    assert job["end_s"] - job["start_s"] == 270


def test_phases_fill_the_run_and_do_not_overlap(run: Path) -> None:
    found = read(run)["progress"].to_pylist()
    spent: dict[str, float] = {}
    for row in found:
        spent[row["phase"]] = spent.get(row["phase"], 0) + row["end_s"] - row["start_s"]
    assert spent == {"startup": 110, "productive": 40, "checkpoint": 60}
    assert all(one["end_s"] == two["start_s"] for one, two in pairwise(found))
    assert [row["step"] for row in found if row["phase"] == "productive"] == [1, 2, 3, 4]


def test_a_run_that_breaks_off_is_not_completed(run: Path) -> None:
    whole = LOG.splitlines()
    (run / "llama-5b-master.log").write_text("\n".join(whole[:6]), encoding="utf-8")
    found = read(run)
    assert found["jobs"]["state"].to_pylist() == ["unknown"]
    assert found["progress"]["phase"].to_pylist() == [
        "startup",
        "productive",
        "productive",
        "checkpoint",
    ]


def test_shared_runs_are_accounted_for(shared: Path) -> None:
    folder = shared / "fleet_traces" / "zhejianglab"
    if not folder.is_dir():
        pytest.skip("needs ../shared/fleet_traces/zhejianglab")
    found = read(folder / "llama2-7b-new-5b-2b1ef-master.log.gz")
    (job,) = found["jobs"].to_pylist()
    rows = found["progress"].to_pylist()
    assert (job["gpus"], job["num_nodes"]) == (32, 4)
    assert sum(row["end_s"] - row["start_s"] for row in rows) == pytest.approx(
        job["end_s"] - job["start_s"]
    )
    work = sum(row["end_s"] - row["start_s"] for row in rows if row["phase"] == "productive")
    # Trainer's own count: 2,436 steps in 111,725 s.
    assert work == pytest.approx(111_725, rel=0.01)
    assert max(row["step"] or 0 for row in rows) == 2436
