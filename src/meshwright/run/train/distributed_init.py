"""What a job would go on from, held against it by headers alone: nothing is built or loaded.

One rank of several looks before they form a group, so that weights of another model are refused
while there is nothing to undo.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import torch.distributed as dist

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.nn.huggingface.hf_loader import find_checkpoint_mismatches
from meshwright.run.parallel.health.watchdog import Watchdog
from meshwright.run.parallel.launch.world import World, init_process_group, read_world
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.checkpoint.checkpoint_folder import (
    CheckpointFolder,
    is_complete,
    read_metadata,
)
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem
from meshwright.run.train.checkpoint.metadata import decode_extra
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.run_folder.run_state import (
    flatten_values,
    list_changed_invariants,
    parse_run_state,
)
from meshwright.run.train.trainer import select_device
from meshwright.spec.layout import Layout


def find_resume_problems(job: TrainJob, folder: Path | None) -> list[Problem]:
    """Return what keeps a job from going on with a run, or from beginning with given weights.

    Without a folder it starts from step 0.
    """
    saved = (
        ()
        if folder is None
        else CheckpointFolder(folder / "checkpoints", LocalFileSystem()).list_saved()
    )
    newest = next((found for found in reversed(saved) if is_complete(found)), None)
    try:
        if newest is not None:
            return list_changed_invariants(
                job, parse_run_state(decode_extra(read_metadata(newest.path)), newest.path)
            )
        if job.initial_load_path is not None and not saved:
            return find_checkpoint_mismatches(
                job.model, job.initial_load_path, job.loss.make_build_options(job.model)
            )
    except DamagedFile:
        return []  # whether an older one will do is for those who load it
    except InputError as error:
        return list(error.problems)
    return []


def reject_job_on_all_ranks(refusal: InputError, environment: Mapping[str, str]) -> NoReturn:
    """Let all processes of a run know that this one cannot read its job, and refuse it."""
    world = read_world(environment)
    if world.size > 1:
        init_process_group(world, job=None, problems=refusal.problems, environment=environment)
    raise refusal


@contextmanager
def init_mesh(
    job: TrainJob,
    folder: Path,
    environment: Mapping[str, str],
    problems: Sequence[Problem] = (),
    *,
    restart: bool = False,
) -> Iterator[Mesh | None]:
    """Meet the other processes of a run; None where it has one device.

    Whatever keeps a rank from running the job, `problems` among it, is told to all before any group
    forms. While they are together, an alarm ends all of them when one is gone, stuck or astray.
    """
    world, found = read_world(environment), list(problems)
    if counted := find_rank_count_problems(job.layout, world):
        found += counted
    elif world.size > 1 and world.rank == 0:
        found += find_resume_problems(job, None if restart else folder)
    if world.size == 1 and found:
        raise InputError(found)
    if world.size == 1:
        yield None
        return
    same = dict(flatten_values(msgspec.to_builtins(job)))
    kind = select_device(job).type
    algorithms: dict[str, dict[str, str]] = {}
    for each in job.device.collective_algorithms:
        algorithms.setdefault(each.group, {})[each.operation] = each.algorithm
    with form_mesh(
        world,
        job.layout,
        kind,
        same=same,
        problems=found,
        folder=folder,
        timeout_s=job.device.collective_timeout_s,
        algorithms=algorithms,
        environment=environment,
    ) as mesh:
        yield mesh


def find_rank_count_problems(layout: Layout, world: World) -> list[Problem]:
    """Return what is wrong where not as many processes were started as a layout has ranks."""
    wanted = layout.gpus
    if world.size == wanted:
        return []
    ranks = "1 rank" if wanted == 1 else f"{wanted} ranks"
    came = "1 process was" if world.size == 1 else f"{world.size} processes were"
    fix = f"use --nproc-per-node {wanted} on one machine, or mw launch for several"
    return [Problem("layout", f"has {ranks}, and {came} started", fix)]


@contextmanager
def form_mesh(
    world: World,
    layout: Layout,
    kind: str,
    *,
    same: Mapping[str, object],
    problems: Sequence[Problem],
    folder: Path | None,
    timeout_s: float,
    algorithms: Mapping[str, Mapping[str, str]] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Mesh]:
    """Form the mesh of a layout on devices of a kind, and watch over it.

    `same` has what must be the same on all ranks; `problems` are told to all, who are refused.
    """
    device = init_process_group(world, kind, job=same, problems=problems, environment=environment)
    try:
        # The alarm speaks first: it knows for whom ranks wait.
        most_s = 2 * timeout_s if algorithms else None
        mesh = Mesh(layout, device=device, timeout_s=most_s, algorithms=algorithms)
        with closing(mesh), Watchdog(mesh, timeout_s=timeout_s, folder=folder):
            yield mesh
    finally:
        dist.destroy_process_group()
