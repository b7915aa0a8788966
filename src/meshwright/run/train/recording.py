"""The timeline of a run over several ranks: always on, bounded, and kept from sitting to sitting.

    timeline/rank-00000.parquet           the newest steps of rank 0, and so on for each rank
    timeline/before/rank-00000.parquet    the steps before them
    timeline/profile/rank-00000.parquet   the steps of --profile, with what torch's profiler saw
    timeline.1/                           what ranks of another layout left

A sitting goes on with the files of the one before. Ranks of another layout mean something else by
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
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.recorder import Recorder
from meshwright.run.train.job import Job
from meshwright.spec.read import plain
from meshwright.timeline import Timeline, read
from meshwright.timeline.paths import refusals

FOLDER = "timeline"
PROFILE = "profile"


def profile_folder(folder: Path, ranks: int) -> Path:
    """Return where the profiled steps of a run go."""
    timeline = folder / FOLDER
    return timeline if ranks == 1 else timeline / PROFILE


@contextmanager
def recorded(job: Job, folder: Path, mesh: Mesh | None) -> Iterator[None]:
    """Let the mesh write down what this rank does, where the job wants it.

    A timeline that cannot be written is warned of; the run goes on without.
    """
    if mesh is None or not job.output.timeline:
        yield
        return
    about = _about(job)
    there = make_room(folder / FOLDER, about) if mesh.rank == 0 else 0
    # Ranks count alike, so that their files hold the same steps; and none opens one too early.
    steps = int(mesh.world.broadcast(torch.tensor([there], device=mesh.device)))
    keep = job.output.timeline_steps
    try:
        recorder = Recorder(
            folder / FOLDER, mesh.rank, metadata=about, keep_steps=keep, steps=min(steps, keep - 1)
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


def _about(job: Job) -> dict[str, str]:
    """Return what the files of all ranks say of the run."""
    layout = job.layout
    return {
        "model": job.model.name,
        "gpus": str(layout.gpus),
        "stages": str(layout.pp),
        "schedule": layout.schedule,
        "layout": msgspec.json.encode(plain(layout)).decode(),
    }


def make_room(timeline: Path, about: dict[str, str]) -> int:
    """Move what ranks of another layout left aside; return how many steps the first has here."""
    found = _first_rank(timeline)
    if found is None or not found.num_spans:
        return 0
    if found.metadata.get("layout") != about.get("layout"):
        _set_aside(timeline)
        return 0
    names = found.strings("name")
    is_step = np.array([name.startswith("step ") for name in names.values], dtype=np.bool_)
    return int(is_step[names.codes].sum())


def _set_aside(timeline: Path) -> None:
    number = 1
    while (aside := timeline.with_name(f"{timeline.name}.{number}")).exists():
        number += 1
    try:
        with refusals(timeline, "moved"):
            timeline.rename(aside)
    except InputError as error:  # nothing is added to it then, which is warned of as well
        warnings.warn(str(error), stacklevel=4)


def _first_rank(timeline: Path) -> Timeline | None:
    """Return what the first rank left, as far as it can be read."""
    try:
        return read(timeline, columns=["name"], ranks=[0])
    except DamagedFile as damage:  # also where its writer was killed
        return damage.kept if isinstance(damage.kept, Timeline) else None
    except InputError:
        return None
