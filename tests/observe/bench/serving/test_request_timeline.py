"""A bench becomes a timeline: waits and answers in lanes that do not overlap."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.bench.serving.request_timeline import assign_lanes, write_request_timeline
from meshwright.timeline import read_timeline
from tests.observe.bench.serving.served_requests import result_of, run_of, served


def test_lanes_are_as_many_as_requests_were_open_at_once() -> None:
    requests = [served(0, 0.0, [1000]), served(1, 0.5, [1000]), served(2, 1.2, [100])]
    assert [lane for _, lane in assign_lanes(requests)] == ["slot 0000", "slot 0001", "slot 0000"]


def test_the_timeline_has_every_request_and_counts_those_in_flight(tmp_path: Path) -> None:
    failed = served(2, 0.7, [], error="cut off", end_s=0.9)
    run = run_of([served(0, 0.0, [100, 900]), served(1, 0.5, [200, 100]), failed])
    write_request_timeline(result_of(run, run), str(tmp_path / "timeline"))
    found = read_timeline(tmp_path / "timeline")
    assert found.ranks == (0, 1)
    assert found.num_spans == 2 * 5  # a wait and an answer each, and a wait that came to nothing
    counts = found.counters.to_pylist()
    open_now = [row["value"] for row in counts if row["name"] == "requests in flight"]
    assert max(open_now) == 3
    assert open_now[-1] == 0


def test_a_timeline_is_not_added_to(tmp_path: Path) -> None:
    result = result_of(run_of([served(0, 0.0, [100, 900])]))
    write_request_timeline(result, str(tmp_path / "timeline"))
    with pytest.raises(InputError, match="already"):
        write_request_timeline(result, str(tmp_path / "timeline"))
