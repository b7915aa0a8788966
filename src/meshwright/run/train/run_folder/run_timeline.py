"""The timeline of a run over several ranks: always on, bounded, and kept from session to session.

    timeline/rank-00000.parquet           the newest steps of rank 0, and so on for each rank
    timeline/previous/rank-00000.parquet  the steps before them
    timeline/profile/rank-00000.parquet   steps of --profile-steps, as torch's profiler saw them
    timeline.1/                           what ranks of another layout left

A session goes on with the files of the one before. Ranks of another layout mean something else by
their numbers: what they left is moved aside first.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch

from meshwright.errors import DamagedFile, InputError
from meshwright.file_errors import convert_os_errors
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.timeline_recorder import TimelineRecorder
from meshwright.run.train.job.train_job import TrainJob
from meshwright.spec.serialization import encode
from meshwright.timeline import Timeline, read_timeline

TIMELINE_FOLDER = "timeline"
PROFILE_FOLDER = "profile"


def get_profile_folder(folder: Path, ranks: int) -> Path:
    """Return where the profiled steps of a run go."""
    timeline = folder / TIMELINE_FOLDER
    return timeline if ranks == 1 else timeline / PROFILE_FOLDER


@contextmanager
def record_timeline(job: TrainJob, folder: Path, mesh: Mesh | None) -> Iterator[None]:
    """Let the mesh write down what this rank does, where the job wants it.

    A timeline that cannot be written is warned of; the run goes on without.
    """
    if mesh is None or not job.logging.timeline:
        yield
        return
    about = _about(job)
    there = archive_other_layouts(folder / TIMELINE_FOLDER, about) if mesh.rank == 0 else 0
    # Ranks count alike, so that their files hold the same steps; and none opens one too early.
    steps = int(mesh.world.broadcast(torch.tensor([there], device=mesh.device)))
    keep = job.logging.timeline_keep_steps
    try:
        recorder = TimelineRecorder(
            folder / TIMELINE_FOLDER,
            mesh.rank,
            metadata=about,
            keep_steps=keep,
            steps=min(steps, keep - 1),
        )
    except InputError as error:
        warnings.warn(f"rank {mesh.rank} writes no timeline: {error}", stacklevel=4)
        yield
        return
    with recorder:
        mesh.recorder = recorder
        try:
            yield
        finally:
            mesh.recorder = None


def _about(job: TrainJob) -> dict[str, str]:
    """Return what the files of all ranks say of the run."""
    layout = job.layout
    return {
        "model": job.model.name,
        "gpus": str(layout.gpus),
        "stages": str(layout.pp),
        "schedule": layout.schedule,
        "layout": msgspec.json.encode(encode(layout)).decode(),
    }


def archive_other_layouts(timeline: Path, about: dict[str, str]) -> int:
    """Move what ranks of another layout left aside; return how many steps the first has here."""
    found = _first_rank(timeline)
    if found is None or not found.num_spans:
        return 0
    if found.metadata.get("layout") != about.get("layout"):
        _set_aside(timeline)
        return 0
    names = found.string_column("name")
    is_step = np.array([name.startswith("step ") for name in names.values], dtype=np.bool_)
    return int(is_step[names.codes].sum())


def _set_aside(timeline: Path) -> None:
    number = 1
    while (aside := timeline.with_name(f"{timeline.name}.{number}")).exists():
        number += 1
    try:
        with convert_os_errors(timeline, "move"):
            timeline.rename(aside)
    except InputError as error:  # nothing is added to it then, which is warned of as well
        warnings.warn(str(error), stacklevel=4)


def _first_rank(timeline: Path) -> Timeline | None:
    """Return what the first rank left, as far as it can be read."""
    try:
        return read_timeline(timeline, columns=["name"], ranks=[0])
    except DamagedFile as damage:  # also where its writer was killed
        return damage.readable if isinstance(damage.readable, Timeline) else None
    except InputError:
        return None
