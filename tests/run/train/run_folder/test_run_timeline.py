"""A run over several ranks leaves a timeline, and keeps it from session to session."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.timeline_recorder import PREVIOUS_FOLDER, TimelineRecorder
from meshwright.run.train.job.job_file import read_job
from meshwright.run.train.loop import train
from meshwright.run.train.profiling.step_profiler import ProfiledSteps
from meshwright.run.train.run_folder.run_timeline import (
    PROFILE_FOLDER,
    archive_other_layouts,
    record_timeline,
)
from meshwright.spec.layout import Layout
from meshwright.timeline import read_timeline
from tests.run.parallel.meeting_place import leave_to_meet_again
from tests.run.train.tiny import job_data, tiny_job


def train_rank(data: dict[str, Any], folder: Path, until: int, profile: bool) -> None:
    """Train as one process of those that a launcher starts."""
    environment = leave_to_meet_again()
    chosen = ProfiledSteps(2, 2) if profile else None
    train(read_job(data), folder, stop_at_step=until, profile_steps=chosen, environment=environment)


def train_on_two(data: dict[str, Any], folder: Path, *, until: int, profile: bool = False) -> None:
    spawn_ranks(2, train_rank, data, folder, until, profile)


def names_of(folder: Path, rank: int) -> list[str]:
    names = read_timeline(folder, ranks=[rank]).string_column("name")
    return [str(names.values[code]) for code in names.codes]


def steps_of(folder: Path, rank: int) -> list[str]:
    return [name for name in names_of(folder, rank) if name.startswith("step ")]


@pytest.mark.slow
def test_each_rank_records_its_newest_steps_and_profiles_the_chosen(
    tokens: Path, tmp_path: Path
) -> None:
    changes = {"layout": {"pp": 2}, "logging": {"timeline_keep_steps": 3}}
    data, run = job_data(tokens, changes), tmp_path / "run"
    train_on_two(data, run, until=4, profile=True)
    for rank in range(2):
        assert steps_of(run / "timeline" / PREVIOUS_FOLDER, rank) == ["step 1", "step 2", "step 3"]
        assert steps_of(run / "timeline", rank) == ["step 4"]
        found = names_of(run / "timeline" / PREVIOUS_FOLDER, rank)
        assert {"forward", "backward", "grad reduce", "optimizer"} <= set(found)
        assert "aten::mm" not in found
        # What the recorder writes lies beside what the profiler sees.
        profiled = names_of(run / "timeline" / PROFILE_FOLDER, rank)
        assert {"step 2", "message pp 0>1", "aten::mm"} <= set(profiled)
        assert not {"step 1", "step 3"} & set(profiled)
    # The next session goes on with these files.
    train_on_two(data, run, until=5)
    for rank in range(2):
        assert steps_of(run / "timeline", rank) == ["step 4", "step 5"]
        assert steps_of(run / "timeline" / PREVIOUS_FOLDER, rank) == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_job_says_whether_ranks_record(wanted: bool, tokens: Path, tmp_path: Path) -> None:
    job, mesh = tiny_job(tokens, {"logging": {"timeline": wanted}}), Mesh(Layout())
    with record_timeline(job, tmp_path, mesh):
        assert (mesh.recorder is not None) == wanted
    assert mesh.recorder is None
    assert (tmp_path / "timeline").exists() == wanted


def test_a_timeline_that_cannot_be_written_does_not_keep_a_run_from_training(
    tokens: Path, tmp_path: Path
) -> None:
    (tmp_path / "timeline").write_text("in the way")
    mesh = Mesh(Layout())
    with (
        pytest.warns(UserWarning, match="writes no timeline"),
        record_timeline(tiny_job(tokens), tmp_path, mesh),
    ):
        assert mesh.recorder is None


def test_steps_of_an_earlier_session_count(tmp_path: Path) -> None:
    folder, about = tmp_path / "timeline", {"layout": "a"}
    assert archive_other_layouts(folder, about) == 0
    recorder = TimelineRecorder(folder, 0, metadata=about)
    recorder.record_step("step 1", 1)
    recorder.record_step("step skipped", 1)
    recorder.flush()
    assert archive_other_layouts(folder, about) == 2, "also of one that was killed"
    recorder.close()
    assert archive_other_layouts(folder, about) == 2


def test_ranks_of_another_layout_leave_the_earlier_timeline_aside(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    for number, layout in enumerate(("a", "b", "c"), start=1):
        assert archive_other_layouts(folder, {"layout": layout}) == 0
        with TimelineRecorder(folder, 0, metadata={"layout": layout}) as recorder:
            recorder.record_step(f"step {number}", 1)
    assert steps_of(tmp_path / "timeline.1", 0) == ["step 1"]
    assert steps_of(tmp_path / "timeline.2", 0) == ["step 2"]
    assert steps_of(folder, 0) == ["step 3"]
