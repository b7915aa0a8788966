"""How the processes of a run find each other: from what started them to a `Mesh`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import torch.distributed as dist

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.alarm import Alarm
from meshwright.run.parallel.launch.environment import World, connect, world_of
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.earlier import earlier_problems
from meshwright.run.train.job import Job
from meshwright.run.train.run_state import leaves
from meshwright.run.train.trainer import pick_device
from meshwright.spec.layout import Layout


def refuse_together(refusal: InputError, environment: Mapping[str, str]) -> NoReturn:
    """Let all processes of a run know that this one cannot read its job, and refuse it."""
    world = world_of(environment)
    if world.size > 1:
        connect(world, job=None, problems=refusal.problems, environment=environment)
    raise refusal


@contextmanager
def joined(
    job: Job,
    folder: Path,
    environment: Mapping[str, str],
    problems: Sequence[Problem] = (),
    *,
    fresh: bool = False,
) -> Iterator[Mesh | None]:
    """Meet the other processes of a run; None where it has one device.

    Whatever keeps a rank from running the job, `problems` among it, is told to all before any group
    forms. While they are together, an alarm ends all of them when one is gone, stuck or astray.
    """
    world, found = world_of(environment), list(problems)
    if counted := wrong_count(job.layout, world):
        found += counted
    elif world.size > 1 and world.rank == 0:
        found += earlier_problems(job, None if fresh else folder)
    if world.size == 1 and found:
        raise InputError(found)
    if world.size == 1:
        yield None
        return
    same = dict(leaves(msgspec.to_builtins(job)))
    kind = pick_device(job).type
    algorithms: dict[str, dict[str, str]] = {}
    for each in job.machine.algorithms:
        algorithms.setdefault(each.group, {})[each.operation] = each.algorithm
    with meet(
        world,
        job.layout,
        kind,
        same=same,
        problems=found,
        folder=folder,
        patience_s=job.machine.patience_s,
        algorithms=algorithms,
        environment=environment,
    ) as mesh:
        yield mesh


def wrong_count(layout: Layout, world: World) -> list[Problem]:
    """Return what is wrong where not as many processes were started as a layout has ranks."""
    wanted = layout.gpus
    if world.size == wanted:
        return []
    ranks = "1 rank" if wanted == 1 else f"{wanted} ranks"
    came = "1 process was" if world.size == 1 else f"{world.size} processes were"
    fix = f"use --nproc {wanted} on one machine, or mw launch for several"
    return [Problem("layout", f"has {ranks}, and {came} started", fix)]


@contextmanager
def meet(
    world: World,
    layout: Layout,
    kind: str,
    *,
    same: Mapping[str, object],
    problems: Sequence[Problem],
    folder: Path | None,
    patience_s: float,
    algorithms: Mapping[str, Mapping[str, str]] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Mesh]:
    """Form the mesh of a layout on devices of a kind, and watch over it.

    `same` has what must be the same on all ranks; `problems` are told to all, who are refused.
    """
    device = connect(world, kind, job=same, problems=problems, environment=environment)
    try:
        # The alarm speaks first: it knows for whom ranks wait.
        most_s = 2 * patience_s if algorithms else None
        mesh = Mesh(layout, device=device, patience_s=most_s, algorithms=algorithms)
        with closing(mesh), Alarm(mesh, patience_s=patience_s, folder=folder):
            yield mesh
    finally:
        dist.destroy_process_group()
