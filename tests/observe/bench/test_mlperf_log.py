"""The log has the lines that MLPerf's tools read."""

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.mlperf_log import PREFIX, MlperfLog
from meshwright.observe.hardware.machine import Machine
from meshwright.observe.hardware.telemetry_sampler import Telemetry


def test_a_run_is_an_interval_with_points(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.txt"
    log = MlperfLog(path, clock=lambda: 1700000000.1234)
    log.start(Machine(device="a device"))
    case = BenchCase(family="gemm", name="forward", sizes={"m": 8})
    seen = Telemetry(clock_mhz=1980.0)
    log.row(BenchRow(case=case, median_s=0.5, p10_s=0.4, p90_s=0.6, num_samples=7, telemetry=seen))
    log.stop("success")
    lines = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    found = [json.loads(line.removeprefix(PREFIX)) for line in lines]
    fields = {"namespace", "time_ms", "event_type", "key", "value", "metadata"}
    assert all(set(one) == fields for one in found)
    assert {one["time_ms"] for one in found} == {1700000000123}
    assert [one["key"] for one in found][-3:] == ["run_start", "gemm_forward", "run_stop"]
    assert found[-3]["event_type"] == "INTERVAL_START"
    assert found[-1]["metadata"]["status"] == "success"
    assert found[-2]["value"] == 0.5
    assert found[-2]["metadata"]["sizes"] == {"m": 8}
    assert found[-2]["metadata"]["telemetry"]["clock_mhz"] == 1980.0


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mlperf-log"):
        MlperfLog(tmp_path)
