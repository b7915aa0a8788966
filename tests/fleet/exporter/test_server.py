import json
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.fleet.exporter import ExporterCollector, JobFolder, render_metrics, serve_metrics
from meshwright.fleet.exporter.nvml_metrics import read_gpu_metrics
from meshwright.fleet.sources.prometheus.metric_names import METRIC_FIELDS
from meshwright.observe.watch.watch_status import HangStatus, WatchStatus, write_status

pytest.importorskip("prometheus_client", reason="needs the extra fleet")


def _sets(*values: int, code: int = 0, **fields: int) -> Any:
    """Answer a question by what its last argument points at."""

    def answer(*given: Any) -> int:
        told = given[-1]._obj
        for name, value in (fields or {"value": values[0]}).items():
            setattr(told, name, value)
        return code

    return answer


def _handle(index: int, handle: Any) -> int:
    handle._obj.value = index + 1
    return 0 if index == 0 else 15  # the second has fallen off the bus


def _named(text: bytes) -> Any:
    def answer(_handle: Any, buffer: Any, _size: Any) -> int:
        buffer.value = text
        return 0

    return answer


def _processes(_handle: Any, count: Any, _room: None) -> int:
    count._obj.value = 3
    return 7  # there is no room for them


def nvml() -> Any:
    """Make a library of two GPUs, of which one answers."""
    asked = "nvmlDeviceGet"
    answers = {
        "Count_v2": _sets(2),
        "HandleByIndex_v2": _handle,
        "UtilizationRates": _sets(gpu=37),
        "MemoryInfo": _sets(used=1 << 30, total=80 << 30),
        "PowerUsage": _sets(350_000),
        "ClockInfo": _sets(1980),
        "Temperature": _sets(0, code=3),  # not supported
        "CurrentClocksThrottleReasons": _sets(4),
        "ComputeRunningProcesses": _processes,
        "UUID": _named(b"GPU-a"),
        "Name": _named(b"NVIDIA H100"),
    }
    return SimpleNamespace(**{asked + name: answer for name, answer in answers.items()})


def test_a_gpu_tells_what_it_does_and_nothing_it_does_not_know() -> None:
    found = {one.name: one for one in read_gpu_metrics(nvml(), "n1")}
    assert found["mw_gpu_util_ratio"].value == 0.37
    assert found["mw_gpu_power_watts"].value == 350
    assert found["mw_gpu_sm_clock_hertz"].value == 1.98e9
    assert found["mw_gpu_processes"].value == 3
    assert "mw_gpu_temperature_celsius" not in found
    labels = {"gpu": "0", "uuid": "GPU-a", "modelName": "NVIDIA H100", "hostname": "n1"}
    assert {tuple(sorted(one.labels.items())) for one in found.values()} == {
        tuple(sorted(labels.items()))
    }


def test_what_we_export_is_what_we_read() -> None:
    ours = {one.name for one in read_gpu_metrics(nvml(), "n1")} - {"mw_gpu_processes"}
    read = {name.name for field in METRIC_FIELDS for name in field.names}
    assert ours <= read


def _run(folder: Path, *rows: dict[str, Any]) -> JobFolder:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return JobFolder(folder, "71")


def test_steps_and_data_waits_add_up_from_page_to_page(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", {"step": 1, "step_s": 2.0})
    collector = ExporterCollector([run], "n1")
    assert 'mw_job_step_seconds_total{hostname="n1",hpc_job="71"} 2.0' in render_metrics(collector)
    _run(tmp_path / "run", {"step": 3, "step_s": 1.0, "data_wait_fraction": 0.25, "mfu": 0.4})
    text = render_metrics(collector)
    assert 'mw_job_step{hostname="n1",hpc_job="71"} 3.0' in text
    assert 'mw_job_step_seconds_total{hostname="n1",hpc_job="71"} 4.0' in text
    assert 'mw_job_data_wait_seconds_total{hostname="n1",hpc_job="71"} 0.5' in text
    assert 'mw_job_mfu_ratio{hostname="n1",hpc_job="71"} 0.4' in text


def test_a_folder_of_a_watch_is_told_too(tmp_path: Path) -> None:
    status = WatchStatus(
        command="train.py", watcher_pid=1, job_pid=2, started_unix_s=0.0, elapsed_s=60.0,
        processes=1, steps=7, step_ms=250.0, overhead_share=0.01, max_overhead=0.02, ranks=(),
        hangs=(HangStatus(last_step=3, detected_after_s=5.0),),
    )  # fmt: skip
    write_status(tmp_path / "status.json", status)
    text = render_metrics(ExporterCollector([JobFolder(tmp_path, "8")], "n1"))
    assert 'mw_job_step_seconds{hostname="n1",hpc_job="8"} 0.25' in text
    assert 'mw_job_watch_overhead_ratio{hostname="n1",hpc_job="8"} 0.01' in text
    assert 'mw_job_hangs_total{hostname="n1",hpc_job="8"} 1.0' in text


def test_a_watch_of_an_older_version_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"steps": 7, "step_ms": 250.0}))
    collector = ExporterCollector([JobFolder(tmp_path, "8")], "n1")
    with pytest.warns(UserWarning, match=r"has the format 'meshwright\.watch\.status/1'"):
        assert "mw_job_step" not in render_metrics(collector)
    assert "mw_job_step" not in render_metrics(collector)


def test_the_page_is_served_to_this_machine_only(tmp_path: Path) -> None:
    page = serve_metrics(
        ExporterCollector([_run(tmp_path / "r", {"step": 1, "step_s": 1.0})]), port=0
    )
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=10) as reply:
            assert b"mw_job_step" in reply.read()
        assert page._server.server_address[0] == "127.0.0.1"
    finally:
        page.close()


def test_a_folder_that_is_none_is_told() -> None:
    with pytest.raises(InputError, match="is no folder"):
        JobFolder.parse("nowhere=71")


def test_the_command_prints_the_page_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path / "run", {"step": 1, "step_s": 2.0})
    assert main(["fleet", "exporter", "--once", "--run", f"{tmp_path / 'run'}=9"]) == 0
    assert 'hpc_job="9"' in capsys.readouterr().out
