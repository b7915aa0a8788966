"""What ranks do is in the timeline: passes as the schedule orders them, exchanges, steps."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.errors import DamagedFile
from meshwright.policy.pipeline.pass_spans import LANE, PASS_NAMES, PROCESS
from meshwright.policy.pipeline.schedule import TRANSFER_OPS
from meshwright.run.parallel import timeline_recorder
from meshwright.run.parallel.forward_backward import (
    ForwardBackwardRunner,
    make_step_schedule,
)
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.timeline_recorder import PREVIOUS_FOLDER, TimelineRecorder
from meshwright.spec.layout import Layout, list_chunks
from meshwright.spec.model import build_decoder_model
from meshwright.timeline import SpanKind, Timeline, TimelineWriter, read_timeline

MODEL = build_decoder_model("dense", layers=4, hidden=16, heads=2, ffn=24, vocab=31)
MICROBATCHES, LENGTH = 4, 8
LAYOUTS = {
    "1f1b": Layout(pp=2, schedule="1f1b", precision="fp32"),
    "zb-v": Layout(pp=2, schedule="zb-v", virtual_stages=2, precision="fp32"),
    "tp": Layout(tp=2, precision="fp32"),
}

Row = dict[str, Any]


def run_once(folder: Path) -> None:
    """Run forward and backward of some microbatches under each layout, recorded."""
    rows = torch.randint(0, 31, (MICROBATCHES, 1, LENGTH + 1))
    batches = [Microbatch(each[:, :-1].clone(), each[:, 1:].clone()) for each in rows]
    for name, layout in LAYOUTS.items():
        mesh = Mesh(layout)
        runner = ForwardBackwardRunner(shard_model(MODEL, mesh, dtype=torch.float32, seed=1))
        with TimelineRecorder(folder / name, mesh.rank) as recorder:
            mesh.recorder = recorder
            runner(batches, 0.01)
        mesh.recorder = None
        runner(batches, 0.01)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    folder = tmp_path_factory.mktemp("recorded")
    spawn_ranks(2, run_once, folder)
    return {name: read_timeline(folder / name).spans.to_pylist() for name in LAYOUTS}


def passes(rows: list[Row], rank: int) -> list[Row]:
    mine = (row for row in rows if row["rank"] == rank and row["lane"] == LANE)
    return sorted(mine, key=lambda row: int(row["start_ns"]))


@pytest.mark.parametrize("kind", ["1f1b", "zb-v"])
def test_passes_are_those_of_the_schedule_in_its_order(
    kind: str, recorded: dict[str, list[Row]]
) -> None:
    layout = LAYOUTS[kind]
    schedule = make_step_schedule(layout, MICROBATCHES)
    held = {one.position: one for one in list_chunks(layout, MODEL.layers)}
    for rank in range(2):
        found = passes(recorded[kind], rank)
        assert [
            (row["name"], row["microbatch"], row["layer"], msgspec.json.decode(row["extra"]))
            for row in found
        ] == [
            (
                PASS_NAMES[one.op],
                one.microbatch,
                held[one.chunk].first,
                {"chunk": one.chunk, "layers": [held[one.chunk].first, held[one.chunk].last]},
            )
            for one in schedule.actions[rank]
            if one.op not in TRANSFER_OPS
        ]
        assert {(row["process"], row["kind"], row["stage"]) for row in found} == {
            (PROCESS, SpanKind.HOST.value, rank)
        }
        ends = [row["start_ns"] + row["duration_ns"] for row in found]
        later = [row["start_ns"] for row in found[1:]]
        assert all(end <= start for end, start in zip(ends[:-1], later, strict=True))


def test_messages_between_stages_carry_their_bytes(recorded: dict[str, list[Row]]) -> None:
    one_stream = LENGTH * MODEL.hidden * 4
    for rank in range(2):
        moved = [
            (row["group"], row["collective"], row["bytes"], row["dtype"])
            for row in recorded["1f1b"]
            if row["rank"] == rank and row["kind"] == SpanKind.COMMUNICATION
        ]
        message = ("message", one_stream, "float32")
        assert sorted(moved) == sorted(
            [(way, *message) for way in ("pp 0>1", "pp 1>0") for _ in range(MICROBATCHES)]
        )


def test_one_stage_records_each_microbatch_and_what_ranks_exchange(
    recorded: dict[str, list[Row]],
) -> None:
    rows = recorded["tp"]
    for rank in range(2):
        found = [(row["name"], row["microbatch"]) for row in passes(rows, rank)]
        both = ("forward", "backward")
        assert found == [(name, number) for number in range(MICROBATCHES) for name in both]
        moved = [row for row in rows if row["rank"] == rank and row["group"] == "tp"]
        exchanged = [row for row in moved if row["kind"] == SpanKind.COMMUNICATION]
        # Two sums a layer each way of a microbatch, and those of embedding and head.
        sums = [row for row in exchanged if row["bytes"] == LENGTH * MODEL.hidden * 4]
        assert len(sums) >= MICROBATCHES * MODEL.layers * 4
        assert all(row["collective"] and row["bytes"] > 0 for row in exchanged)
        waits = [row for row in moved if row["kind"] == SpanKind.WAIT]
        assert len(waits) == len(exchanged)


def steps_in(folder: Path) -> list[str]:
    names = read_timeline(folder).string_column("name")
    return [str(names.values[code]) for code in names.codes]


def test_only_the_newest_steps_stay(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    with TimelineRecorder(folder, 0, keep_steps=3) as recorder:
        for number in range(1, 12):
            recorder.record_step(f"step {number}", 1)
    assert steps_in(folder) == ["step 10", "step 11"]
    assert steps_in(folder / PREVIOUS_FOLDER) == ["step 7", "step 8", "step 9"]
    # A later session goes on with the same files.
    with TimelineRecorder(folder, 0, keep_steps=3, steps=2) as recorder:
        recorder.record_step("step 12", 1)
        recorder.record_step("step 13", 1)
    assert steps_in(folder) == ["step 13"]
    assert steps_in(folder / PREVIOUS_FOLDER) == ["step 10", "step 11", "step 12"]


def test_a_timeline_can_be_read_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_recorder, "FLUSH_NS", 1)
    with TimelineRecorder(tmp_path / "timeline", 0) as recorder:
        recorder.record_step("step 1", 1)
        with pytest.raises(DamagedFile, match="still runs") as found:
            read_timeline(tmp_path / "timeline")
        assert isinstance(found.value.readable, Timeline)
        assert found.value.readable.num_spans == 1


def test_a_disk_that_fails_is_warned_of_and_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    with TimelineRecorder(folder, 0, keep_steps=1) as recorder:
        (folder / PREVIOUS_FOLDER).write_text("in the way")
        with pytest.warns(UserWarning, match="left out from now on"):
            recorder.record_step("step 1", 1)
        recorder.record_step("step 2", 1)
    assert steps_in(folder) == ["step 1"]


def test_spans_can_be_copied_to_another_timeline(tmp_path: Path) -> None:
    with TimelineRecorder(tmp_path / "timeline", 0, keep_steps=2) as recorder:
        recorder.record_step("step 1", 1)
        with (
            TimelineWriter(tmp_path / "other", rank=0) as other,
            recorder.tee(other),
        ):
            recorder.record_step("step 2", 1)
            recorder.record_step("step 3", 1)
        recorder.record_step("step 4", 1)
    assert steps_in(tmp_path / "other") == ["step 2", "step 3"]
    assert steps_in(tmp_path / "timeline" / PREVIOUS_FOLDER) == ["step 3", "step 4"]
