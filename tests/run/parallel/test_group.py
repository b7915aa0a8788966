"""What the ranks of a group exchange is right, written down, and recorded."""

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

import torch

from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.group import Group
from meshwright.run.parallel.journal import Journal
from meshwright.timeline import read
from tests.run.parallel.exchanges import lines_of_a_backward, wrong


def test_operations_give_what_they_promise_and_are_recorded(tmp_path: Path) -> None:
    assert launch(4, wrong, None, tmp_path / "timeline") == [{}] * 4
    spans = read(tmp_path / "timeline").spans.to_pylist()
    assert {span["rank"] for span in spans} == {0, 1, 2, 3}
    mine = [span for span in spans if span["rank"] == 2]
    gathers = [span for span in mine if span["name"] == "all_gather tp"]
    assert len(gathers) == 6
    first = gathers[0]
    assert (first["kind"], first["group"], first["dtype"]) == ("communication", "tp", "float32")
    assert first["bytes"] == 16 * 6 * 4
    waits = [span for span in mine if span["kind"] == "wait"]
    assert {span["lane"] for span in waits} == {"main"}
    # All but the two messages of each round, one out and one in, have one lane.
    lanes = {span["lane"] for span in mine if span["kind"] == "communication"}
    assert lanes == {"exchange tp", "exchange tp 2>3", "exchange tp 1>2", "exchange tp-cp-dp-pp"}
    assert [span["microbatch"] for span in mine if span["name"] == "update"] == [3]
    for lane in lanes:
        ordered = sorted(
            (span["start_ns"], span["start_ns"] + span["duration_ns"])
            for span in mine
            if span["lane"] == lane
        )
        assert all(one[1] <= other[0] for one, other in pairwise(ordered)), f"in order on {lane}"


def test_backward_is_written_down_with_the_line_of_the_forward() -> None:
    for entries in launch(2, lines_of_a_backward):
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
    journal, x = Journal(), torch.ones(3)
    group = Group("tp", (5,), 5, None, journal)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert not journal.entries


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(ValueError, match="group tp of 2 ranks needs torch's group"):
        Group("tp", (0, 1), 0, None, Journal())
