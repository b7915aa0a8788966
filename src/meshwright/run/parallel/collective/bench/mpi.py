"""The same sweep done by an MPI library, through mpi4py: a peer to measure beside.

`run_mpi_bench` starts `mpirun`; every process it starts runs this module as a program. MPI runs its
own algorithms only: what ours need of a network, torch gives them.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.policy.collective.bus_bandwidth import bus_factor
from meshwright.policy.collective.collective import Collective
from meshwright.run.parallel.collective.bench.bench_row import (
    CollectiveBenchRow,
    MessageSizeSweep,
    count_elements,
)
from meshwright.run.parallel.collective.bench.test_data import make_expected_output, make_input_data
from meshwright.run.parallel.collective.chunk_layout import ChunkLayout

_TYPES = ("float32", "float64", "int32", "int64")
_OPS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "gather", "reduce",
        "reduce_scatter", "scatter")  # fmt: skip


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    ranks: int
    root: int
    sweep: MessageSizeSweep


def run_mpi_bench(
    collective: Collective, sweep: MessageSizeSweep, *, timeout_s: float
) -> list[CollectiveBenchRow]:
    """Measure MPI's own version of an operation; out of place."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        hint = "apt install openmpi-bin, and pip install mpi4py"
        raise MissingDependency("measuring MPI needs mpirun and mpi4py", hint)
    _check(collective, sweep)
    question = _Question(
        op=collective.op, ranks=collective.ranks, root=collective.root, sweep=sweep
    )
    # Ranks of one machine need no sockets; mpirun itself listens at every address all the same.
    flags = [
        "--mca",
        "btl",
        "^tcp",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        str(collective.ranks),
    ]
    if collective.ranks > len(os.sched_getaffinity(0)):
        flags += ["--mca", "mpi_yield_when_idle", "1"]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "question.json", Path(folder) / "answer.json"
        asked.write_bytes(msgspec.json.encode(question))
        ran = subprocess.run(
            ["mpirun", *flags, sys.executable, "-m", __name__, str(asked), str(answered)],
            env={**os.environ, **allowed},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if ran.returncode or not answered.exists():
            last = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1:]
            raise MissingDependency(f"mpirun failed: {' '.join(last)}", "run it by hand to see why")
        return msgspec.json.decode(answered.read_bytes(), type=list[CollectiveBenchRow])


def _check(collective: Collective, sweep: MessageSizeSweep) -> None:
    problems = []
    if collective.op not in _OPS:
        fix = f"use one of {', '.join(_OPS)}"
        problems.append(Problem("op", f"{collective.op} is not measured over MPI", fix))
    if sweep.dtype not in _TYPES:
        fix = f"use one of {', '.join(_TYPES)}"
        problems.append(Problem("dtype", f"MPI has no {sweep.dtype}", fix))
    if problems:
        raise InputError(problems)


def _call(op: str, root: int, mine: Any, out: Any) -> Callable[[], None]:
    """Return the call of MPI that is to be timed."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    match op:
        case "all_reduce":
            return lambda: world.Allreduce(mine, out)
        case "reduce_scatter":
            return lambda: world.Reduce_scatter_block(mine, out)
        case "all_gather":
            return lambda: world.Allgather(mine, out)
        case "all_to_all":
            return lambda: world.Alltoall(mine, out)
        case "reduce":
            return lambda: world.Reduce(mine, out, root=root)
        case "gather":
            return lambda: world.Gather(mine, out, root=root)
        case "scatter":
            return lambda: world.Scatter(mine, out, root=root)
        case _:
            return lambda: world.Bcast(mine if world.rank == root else out, root=root)


def _measure(question: _Question) -> list[CollectiveBenchRow]:
    from mpi4py import MPI

    world, sweep, ranks = MPI.COMM_WORLD, question.sweep, question.ranks
    rank, dtype = world.rank, getattr(torch, sweep.dtype)
    op: Any = question.op
    shape = Collective(
        name="mpi", op=op, ranks=ranks, chunks=ranks, slots=2 * ranks, sweeps=(), root=question.root
    )
    rows = []
    for size in sweep.sizes():
        cuts = ChunkLayout(shape, count_elements(shape, size, dtype))
        sizes, right = cuts.get_tensor_sizes(rank), make_expected_output(shape, rank, cuts, dtype)
        sent = make_input_data(shape, rank, cuts, dtype)
        mine = None if sent is None else sent.numpy()
        out = (
            None
            if sizes.output_elements is None
            else np.zeros(sizes.output_elements, dtype=sweep.dtype)
        )
        call = _call(question.op, question.root, mine, out)
        call()
        result = mine if question.op == "broadcast" and rank == question.root else out
        wrong = 0 if right is None or result is None else int((result != right.numpy()).sum())
        for _ in range(sweep.warmup):
            call()
        world.Barrier()
        began = time.perf_counter()
        for _ in range(sweep.iterations):
            call()
        seconds = world.allreduce((time.perf_counter() - began) / sweep.iterations, MPI.MAX)
        nbytes = cuts.elements * dtype.itemsize
        rows.append(
            CollectiveBenchRow(
                op=question.op,
                algorithm="native",
                transport="mpi",
                ranks=ranks,
                dtype=sweep.dtype,
                size_bytes=nbytes,
                elements=cuts.elements,
                in_place=False,
                time_us=seconds * 1e6,
                algbw_gbps=nbytes / seconds / 1e9,
                busbw_gbps=nbytes / seconds / 1e9 * bus_factor(question.op, ranks),
                wrong=world.allreduce(wrong),
            )
        )
    return rows if rank == 0 else []


def _main(asked: str, answered: str) -> None:
    torch.set_num_threads(1)
    rows = _measure(msgspec.json.decode(Path(asked).read_bytes(), type=_Question))
    if rows:
        Path(answered).write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
