"""How the processes of a run find each other: from what started them to a `Mesh`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import torch.distributed as dist

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.alarm import Alarm
from meshwright.run.parallel.launch.environment import connect, world_of
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.earlier import earlier_problems
from meshwright.run.train.job import Job
from meshwright.run.train.run_state import leaves
from meshwright.run.train.trainer import pick_device


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
    world, wanted, found = world_of(environment), job.layout.gpus, list(problems)
    if world.size != wanted:
        ranks = "1 rank" if wanted == 1 else f"{wanted} ranks"
        came = "1 process was" if world.size == 1 else f"{world.size} processes were"
        what = f"has {ranks}, and {came} started"
        fix = f"use --nproc {wanted} on one machine, or mw launch for several"
        found.append(Problem("layout", what, fix))
    elif world.size > 1 and world.rank == 0:
        found += earlier_problems(job, None if fresh else folder)
    if world.size == 1 and found:
        raise InputError(found)
    if world.size == 1:
        yield None
        return
    same = dict(leaves(msgspec.to_builtins(job)))
    kind = pick_device(job).type
    device = connect(world, kind, job=same, problems=found, environment=environment)
    try:
        algorithms: dict[str, dict[str, str]] = {}
        for each in job.machine.algorithms:
            algorithms.setdefault(each.group, {})[each.operation] = each.algorithm
        # The alarm speaks first: it knows for whom ranks wait.
        patience_s = 2 * job.machine.patience_s if algorithms else None
        mesh = Mesh(job.layout, device=device, patience_s=patience_s, algorithms=algorithms)
        with closing(mesh), Alarm(mesh, patience_s=job.machine.patience_s, folder=folder):
            yield mesh
    finally:
        dist.destroy_process_group()
