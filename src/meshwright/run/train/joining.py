"""How the processes of a run find each other: from what started them to a `Mesh`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch.distributed as dist

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.alarm import Alarm
from meshwright.run.parallel.launch.environment import connect, world_of
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.job import Job
from meshwright.run.train.run_state import leaves
from meshwright.run.train.trainer import pick_device


@contextmanager
def joined(job: Job, folder: Path, environment: Mapping[str, str]) -> Iterator[Mesh | None]:
    """Meet the other processes of a run; None where it has one device.

    While they are together, an alarm ends all of them when one is gone, stuck or astray.
    """
    world, wanted = world_of(environment), job.layout.gpus
    if world.size != wanted:
        ranks = "1 rank" if wanted == 1 else f"{wanted} ranks"
        came = "1 process was" if world.size == 1 else f"{world.size} processes were"
        what = f"has {ranks}, and {came} started"
        fix = f"use --nproc {wanted} on one machine, or mw launch for several"
        raise InputError([Problem("layout", what, fix)])
    if world.size == 1:
        yield None
        return
    same = dict(leaves(msgspec.to_builtins(job)))
    device = connect(world, pick_device(job).type, job=same, environment=environment)
    try:
        mesh = Mesh(job.layout, device=device)
        with Alarm(mesh, patience_s=job.machine.patience_s, folder=folder):
            yield mesh
    finally:
        dist.destroy_process_group()
