"""The examples of the guide run."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "timeline.md"


def test_examples_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {"start_ns": 5, "duration_ns": 10, "time_ns": 7}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    assert (tmp_path / "trace.json.gz").exists()


def test_query_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    duckdb = pytest.importorskip("duckdb")
    from meshwright.timeline import Timeline, write_timeline

    (tmp_path / "run").mkdir()
    columns = {"rank": 0, "start_ns": [0], "duration_ns": 2_000_000, "kind": "wait", "name": "x"}
    write_timeline(
        Timeline.from_columns(columns | {"group": "tp"}, source="measured"),
        tmp_path / "run/timeline",
    )
    monkeypatch.chdir(tmp_path)
    (query,) = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert duckdb.connect().execute(query).fetchall() == [(0, "wait", 2.0)]
