"""What the ranks of a group exchange is right, written down, and recorded."""

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

import torch

from meshwright.run.parallel.flight_recorder import FlightRecorder
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.timeline import read_timeline
from tests.run.parallel.exchanges import lines_of_a_backward, wrong


def test_operations_give_what_they_promise_and_are_recorded(tmp_path: Path) -> None:
    assert spawn_ranks(4, wrong, None, tmp_path / "timeline") == [{}] * 4
    spans = read_timeline(tmp_path / "timeline").spans.to_pylist()
    assert {span["rank"] for span in spans} == {0, 1, 2, 3}
    mine = [span for span in spans if span["rank"] == 2]
    gathers = [span for span in mine if span["name"] == "all_gather tp"]
    assert len(gathers) == 6
    first = gathers[0]
    assert (first["kind"], first["group"], first["dtype"]) == ("communication", "tp", "float32")
    assert first["bytes"] == 16 * 6 * 4
    waits = [span for span in mine if span["kind"] == "wait"]
    assert {span["lane"] for span in waits} == {"host"}
    # All but the two messages of each round, one out and one in, have one lane.
    lanes = {span["lane"] for span in mine if span["kind"] == "communication"}
    assert lanes == {"comm tp", "comm tp 2>3", "comm tp 1>2", "comm tp-cp-dp-pp"}
    assert [span["microbatch"] for span in mine if span["name"] == "update"] == [3]
    for lane in lanes:
        ordered = sorted(
            (span["start_ns"], span["start_ns"] + span["duration_ns"])
            for span in mine
            if span["lane"] == lane
        )
        assert all(one[1] <= other[0] for one, other in pairwise(ordered)), f"in order on {lane}"


def test_backward_is_written_down_with_the_line_of_the_forward() -> None:
    for entries in spawn_ranks(2, lines_of_a_backward):
        assert entries == [
            (op, "model")
            for op in (
                "all_gather",
                "reduce_scatter",
                "all_to_all",
                "all_to_all",
                "all_gather",
                "reduce_scatter",
                "all_reduce sum",
            )
        ]


def test_a_group_of_one_does_nothing_and_writes_nothing_down() -> None:
    journal, x = FlightRecorder(), torch.ones(3)
    group = GroupCoordinator("tp", (5,), 5, None, journal)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert not journal.records


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(ValueError, match="group tp of 2 ranks needs torch's group"):
        GroupCoordinator("tp", (0, 1), 0, None, FlightRecorder())
