"""The account of what a real Slurm kept, held against sums made without it."""

import csv
import json
from pathlib import Path

import pytest

from meshwright.cli import main

pytestmark = pytest.mark.real
pytest.importorskip("duckdb")


def test_the_hours_of_real_jobs_are_all_there(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared / "fleet_traces" / "slurm_real" / "22.05.8"
    if not folder.is_dir():
        pytest.skip("needs the recorded Slurm of shared/fleet_traces")
    jobs, nodes = folder / "sacct_P_X.psv", folder / "scontrol_d_show_node.txt"
    store = str(tmp_path / "store")
    words = ["fleet", "ingest", str(jobs), str(nodes), "--kind", "slurm", "--cluster", "real", "-q"]
    assert main([*words, "--store", store]) == 0
    capsys.readouterr()
    assert main(["fleet", "report", "--since", "30d", "--json", "--store", store]) == 0
    told = json.loads(capsys.readouterr().out)
    with jobs.open(encoding="utf-8") as lines:
        gpu_s = sum(
            float(row["ElapsedRaw"]) * float(tres.split("=")[1])
            for row in csv.DictReader(lines, delimiter="|")
            for tres in row["AllocTRES"].split(",")
            if tres.startswith("gres/gpu=")
        )
    assert gpu_s > 0  # all jobs of the recording had ended
    assert told["allocated_gpu_hours"] + told["oversubscribed_gpu_hours"] == pytest.approx(
        gpu_s / 3600, rel=1e-9
    )
    whole = sum(one["gpu_hours"] for one in told["buckets"].values())
    assert whole == pytest.approx(told["gpu_hours"], rel=1e-12)


def test_idle_pods_of_a_public_trace_are_found(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared / "fleet_traces" / "alibaba_v2026_genai"
    if not folder.is_dir():
        pytest.skip("needs the public traces of shared/fleet_traces")
    store = str(tmp_path / "store")
    assert main(["fleet", "ingest", str(folder), "-q", "--store", store]) == 0
    capsys.readouterr()
    assert main(["fleet", "report", "--since", "7d", "--json", "--store", store]) == 0
    told = json.loads(capsys.readouterr().out)
    held, idle = told["allocated_gpu_hours"], told["buckets"]["idle"]["gpu_hours"]
    # Counted apart from the account: 2,569 hours of pods, 66.85 % of samples at nought, 777 hours
    # in windows of half an hour and more without any activity.
    assert held == pytest.approx(2569, rel=0.01)
    assert 0.95 * 777 < idle < 0.6685 * held
    assert told["forecasts"] == {}  # a single day
