"""The Python examples of the guide run: names in them are those that the code has today."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from meshwright.fleet.store import FleetStore
from meshwright.fleet.tables import TABLE_SCHEMAS
from meshwright.timeline import write_timeline
from tests.observe.analyze.jobs import steady_job

pytest.importorskip("duckdb", reason="needs the extra fleet")
pytest.importorskip("pandas")
pytest.importorskip("polars")

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide"
BEGIN_S, HOUR_S = 1_794_300_000.0, 3600.0
"""A time that all examples of the fleet look at."""


def read_blocks(page: str) -> list[str]:
    """Return the Python examples of a page, in order."""
    text = (GUIDE / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_blocks(blocks: list[str], page: str, **names: Any) -> dict[str, Any]:
    """Run examples one after another, each with what those before it have made."""
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


def fill_store(folder: Path) -> None:
    """Make a store of one node, one job that does nothing for a day, and its GPU."""
    job = {"cluster": "east", "job": "1", "attempt": 0}
    end_s = BEGIN_S + 24 * HOUR_S
    rows: dict[str, list[dict[str, Any]]] = {
        "jobs": [{**job, "user": "ada", "name": "train", "state": "completed", "gpus": 1.0,
                  "gpu_kind": "h100", "nodes": ["n1"], "submit_s": BEGIN_S, "start_s": BEGIN_S,
                  "end_s": end_s}],
        "allocations": [{**job, "node": "n1", "gpu": 0, "start_s": BEGIN_S, "end_s": end_s,
                         "gpu_fraction": 1.0}],
        "nodes": [{"cluster": "east", "node": "n1", "since_s": BEGIN_S, "state": "up", "gpus": 1,
                   "gpu_kind": "h100"}],
        "gpu_samples": [{"cluster": "east", "node": "n1", "gpu": 0, "time_s": BEGIN_S + 60.0 * at,
                         "gpu_util": 0.0, "memory_used": 1e9} for at in range(24 * 60)],
    }  # fmt: skip
    with FleetStore(folder, create=True) as store:
        for table, of in rows.items():
            store.put(table, pa.Table.from_pylist(of, schema=TABLE_SCHEMAS[table]))


@pytest.mark.parametrize(
    "page", ["fleet.md", "fleet-account.md", "fleet-patterns.md", "fleet-health.md"]
)
def test_examples_of_the_fleet_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill_store(tmp_path / "fleet")
    blocks = read_blocks(page)
    assert blocks
    found = run_blocks(blocks, page)
    assert found.get("jobs") is None or found["jobs"].num_rows <= 1


def test_the_example_of_patterns_prints_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fill_store(tmp_path / "fleet")
    run_blocks(read_blocks("fleet-patterns.md"), "fleet-patterns.md")
    assert "never-used ada" in capsys.readouterr().out


def test_examples_of_timelines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    times = {"start_ns": 0, "duration_ns": 10, "time_ns": 0}
    found = run_blocks(read_blocks("timeline.md"), "timeline.md", **times)
    assert found["timeline"].num_spans == 1000
    assert (tmp_path / "trace.json.gz").exists()


def test_the_example_of_analyses_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", "off")
    job = steady_job(steps=12, compute_us=lambda rank, _step: 1300.0 if rank == 2 else 900.0)
    for name in ("traces", "before", "after"):
        write_timeline(job, tmp_path / name)
    run_blocks(read_blocks("observe.md")[:1], "observe.md")
