"""How the processes of a run find each other: from what started them to a `Mesh`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.job import Job


@contextmanager
def joined(job: Job, environment: Mapping[str, str]) -> Iterator[Mesh | None]:
    """Meet the other processes of a run; None where it has one device."""
    processes = int(environment.get("WORLD_SIZE") or 1)
    if processes != job.layout.gpus:
        what = f"asks for {job.layout.gpus} ranks, and {processes} processes were started"
        fix = f"use mw train --nproc {job.layout.gpus}, or tp × cp × pp × dp = {processes}"
        raise InputError([Problem("layout", what, fix)])
    if processes == 1:
        yield None
        return
    dist.init_process_group("gloo")
    try:
        yield Mesh(job.layout)
    finally:
        dist.destroy_process_group()
