"""Patterns on public traces, against what the raw numbers say by hand."""

import csv
import gzip
import io
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from meshwright.fleet.patterns import build_fleet_data, find_cases
from meshwright.fleet.statistics.robust import robust_z_scores
from meshwright.fleet.tables import TABLE_SCHEMAS

pytestmark = pytest.mark.real


def _duty(shared: Path) -> dict[str, list[tuple[float, float]]]:
    """Time and utilization of each pod, in order."""
    path = shared / "fleet_traces" / "alibaba_v2026_genai" / "pod_gpu_duty_cycle_anon.tar.gz"
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tarfile.open(path) as archive:
        member = next(one for one in archive if not Path(one.name).name.startswith("._"))
        raw = archive.extractfile(member)
        assert raw is not None
        for row in csv.DictReader(io.TextIOWrapper(raw)):
            found[row["container_ip"]].append((float(row["timestamp_anon"]), float(row["value"])))
    return {pod: sorted(own) for pod, own in found.items()}


def _stretches(own: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Idle stretches of a pod by a plain loop: no value above 1 %, no five minutes unseen."""
    found: list[tuple[float, float]] = []
    idle: list[float] = []
    before = own[0][0]
    for time, value in own:
        if idle and (value > 1 or time - before > 300):
            found.append((idle[0], idle[-1]))
            idle = []
        if value <= 1:
            idle.append(time)
        before = time
    return [*found, (idle[0], idle[-1])] if idle else found


def _table(name: str, columns: dict[str, object]) -> pa.Table:
    size = len(columns["node" if name != "jobs" else "job"])  # type: ignore[arg-type]
    return pa.table(
        {field.name: pa.array(columns[field.name], field.type) if field.name in columns
         else pa.nulls(size, field.type) for field in TABLE_SCHEMAS[name]},
        schema=TABLE_SCHEMAS[name],
    )  # fmt: skip


def test_idle_pods_of_a_serving_cluster_are_those_of_the_raw_samples(shared: Path) -> None:
    duty = _duty(shared)
    pods = list(duty)
    start, end = ([own[at][0] for own in duty.values()] for at in (0, -1))
    flat = [(pod, time, value) for pod, own in duty.items() for time, value in own]
    tables = {
        "jobs": _table("jobs", {"cluster": ["g"] * len(pods), "job": pods, "start_s": start,
                                "attempt": [0] * len(pods), "end_s": end, "submit_s": start,
                                "gpus": [1.0] * len(pods), "state": ["running"] * len(pods)}),
        "allocations": _table("allocations", {"cluster": ["g"] * len(pods), "job": pods,
                                              "node": pods,
                                "attempt": [0] * len(pods), "gpu": [0] * len(pods),
                                "start_s": start, "end_s": end, "gpu_fraction": [1.0] * len(pods)}),
        "gpu_samples": _table("gpu_samples", {"cluster": ["g"] * len(flat),
                                      "node": [pod for pod, _, _ in flat],
                                      "gpu": [0] * len(flat),
                                      "time_s": [time for _, time, _ in flat],
                                      "gpu_util": [value / 100 for _, _, value in flat]}),
    }  # fmt: skip
    fleet = build_fleet_data(tables, since_s=min(start), until_s=max(end) + 60)
    told = {
        fleet.jobs.job.at(int(case.detection.jobs[0])): case.attributed_hours or 0.0
        for case in find_cases(fleet)
        if case.pattern.family == "idle"
    }
    by_hand = {pod: [stop - first for first, stop in _stretches(own)] for pod, own in duty.items()}
    certain = {pod for pod, own in by_hand.items() if max(own, default=0) >= 4200
               and sum(one for one in own if one >= 1800) >= 0.15 * (duty[pod][-1][0]
                                                                   - duty[pod][0][0])}  # fmt: skip
    never = {pod for pod, own in by_hand.items() if max(own, default=0) < 3000}
    assert len(certain) > 50
    assert certain <= set(told)
    assert not never & set(told)
    hours = sum(sum(one for one in by_hand[pod] if one >= 1800) for pod in told) / 3600
    assert sum(told.values()) == pytest.approx(hours, rel=0.05)


def test_the_slow_worker_of_a_real_job_stands_out(shared: Path) -> None:
    def odd(job: int) -> list[tuple[int, int]]:
        """Window and worker, where at most an eighth of the workers is slow at once."""
        path = shared / "fleet_traces" / "alibaba_v2020" / f"minibatch_job_{job}_norm.csv.gz"
        with gzip.open(path, "rt") as lines:
            rows = list(csv.DictReader(lines))
        worker, time, batch = (
            np.array([float(row[name]) for row in rows])
            for name in ("worker", "time", "batch_time_norm")
        )
        window = ((time - time.min()) * 20 // (np.ptp(time) + 1)).astype(int)
        median = np.array([[np.median(batch[(worker == at) & (window == now)]) for at in range(10)]
                           for now in range(20)])  # fmt: skip
        ratio = median / np.median(median, axis=1, keepdims=True)
        score = robust_z_scores(ratio.ravel(), np.repeat(np.arange(20), 10), 0.02).reshape(20, 10)
        slow = (score >= 6) & (ratio >= 1.1)
        slow[slow.sum(axis=1) > 1] = False
        return [(int(now), int(at)) for now, at in np.argwhere(slow)]

    assert odd(1) == [(12, 6)]
    assert odd(2) == []
