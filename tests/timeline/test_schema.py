"""What the columns promise, and that importing the room is cheap."""

import subprocess
import sys
from pathlib import Path

from meshwright import timeline
from meshwright.timeline.schema import COUNTER_COLUMNS, SPAN_COLUMNS, SpanKind

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "timeline.md"


def test_every_column_is_in_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")}
    assert {f"`{column.name}`" for column in (*SPAN_COLUMNS, *COUNTER_COLUMNS)} <= rows


def test_every_kind_is_in_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert [kind for kind in SpanKind if f"`{kind.value}`" not in text] == []


def test_numbers_that_are_times_or_sizes_say_their_unit() -> None:
    timed = [
        c.name for c in (*SPAN_COLUMNS, *COUNTER_COLUMNS) if "start" in c.name or "dur" in c.name
    ]
    assert timed == ["start_ns", "duration_ns"]


def test_every_exported_name_loads() -> None:
    assert [name for name in timeline.__all__ if getattr(timeline, name, None) is None] == []


def test_importing_the_room_loads_neither_numpy_nor_arrow() -> None:
    code = "import sys, meshwright.timeline as t; t.SpanKind; print(*sys.modules)"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pyarrow", "pandas"} & set(fresh.stdout.split())
