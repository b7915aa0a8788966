"""The reader against its slow twin, on every real trace."""

from collections import Counter
from pathlib import Path

import pytest

from meshwright.timeline import Timeline
from meshwright.timeline.readers.kineto.kineto_reader import TraceDetail, read_kineto
from meshwright.timeline.readers.trace_folder import find_traces
from tests.timeline.readers.kineto_oracle import count_slowly, read_slowly

pytestmark = pytest.mark.real
TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
FILES = [
    file.path
    for file in (find_traces(TRACES) if TRACES.is_dir() else ())
    if file.format == "kineto" and file.path.suffix == ".gz" and "dftracer" not in str(file.path)
]
SMALL = [path for path in FILES if path.stat().st_size < 800_000]
LARGE = [path for path in FILES if path.stat().st_size >= 800_000]


def _same(path: Path) -> None:
    timeline = read_kineto(path)
    for name, expected in read_slowly(path).items():
        found = (
            timeline.spans.column(name).to_pylist()
            if name in timeline.spans.schema.names
            else [None] * len(expected)
        )
        assert found == expected, name
    counters = timeline.counters.to_pydict()
    rows = zip(counters["name"], counters["time_ns"], counters["value"], strict=True)
    assert Counter(rows) == count_slowly(path)


@pytest.mark.skipif(not FILES, reason="needs the shared traces beside the repository (../shared)")
@pytest.mark.parametrize("path", SMALL, ids=lambda path: str(path.relative_to(TRACES)))
def test_says_what_the_obvious_reader_says(path: Path) -> None:
    _same(path)


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="needs the shared traces beside the repository (../shared)")
@pytest.mark.parametrize("path", LARGE, ids=lambda path: str(path.relative_to(TRACES)))
def test_says_what_the_obvious_reader_says_of_large_traces(path: Path) -> None:
    _same(path)


def test_passes_every_check_that_columns_from_outside_pass(shared: Path) -> None:
    path = shared / "traces/modded-nanogpt/8rank-h100-2025-12-11/rank-1.json.gz"
    timeline = read_kineto(path, detail=TraceDetail.FULL)
    spans = {name: timeline.spans.column(name) for name in timeline.spans.column_names}
    again = Timeline.from_columns(spans, source="measured", metadata=timeline.metadata)
    assert again.equals(timeline)


def test_kernels_of_collectives_know_their_buffers(shared: Path) -> None:
    path = shared / "traces/modded-nanogpt/8rank-h100-2025-12-11/rank-0.json.gz"
    spans = read_kineto(path).spans.to_pylist()
    kernels = [span for span in spans if span["kind"] == "communication"]
    assert {span["collective"] for span in kernels} == {"all_gather", "reduce_scatter"}
    known = [span for span in kernels if span["bytes"] is not None]
    assert len(known) == 56  # The other 20 were launched before the profiler started.
    assert max(span["bytes"] for span in known) == 37748736 * 4
