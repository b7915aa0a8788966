"""How fast our collectives run on this machine, beside gloo's own and Open MPI's."""

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.policy.collective import build_algorithm
from meshwright.run.parallel.collective import CollectiveExecutor, RankCommunicator
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks

NAME = "collective_execution"
QUESTION = "How fast is an all-reduce of ours on real processes, beside gloo and Open MPI?"

KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
RANKS = (2, 4, 8)
ROUNDS = 3
"""Ours with gloo, and Open MPI, take turns this often."""
GLOO = "gloo"
SHARED = ("ring", "two_shot", "halving_doubling")
POSTED = ("ring", "two_shot")

Times = dict[tuple[str, int], list[float]]
"""Seconds of the slowest rank, by contender and size."""


class Peer(NamedTuple):
    """A way to start Open MPI."""

    name: str
    flags: tuple[str, ...]


PEERS = (
    Peer("Open MPI, shared memory", ("--mca", "btl", "vader,self")),
    Peer("Open MPI, TCP", ("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")),
)


def on_rank(sizes: tuple[int, ...], iterations: int) -> Times:
    """Time every contender in turn, again and again, on one rank."""
    ranks = dist.get_world_size()
    run: dict[str, Callable[[torch.Tensor], object]] = {GLOO: dist.all_reduce}
    for transport, names in (("shm", SHARED), ("torch", POSTED)):
        team = RankCommunicator(transport=transport, timeout_s=60.0)  # type: ignore[arg-type]
        for name in names:
            ours = CollectiveExecutor(build_algorithm(name, "all_reduce", ranks), team)
            run[f"{name} over {transport}"] = ours.run_in_place
    times: Times = {}
    for size in sizes:
        tensor = torch.zeros(size // 4)
        for number in range(iterations + 1):
            for name, call in run.items():
                seconds = _slowest(call, tensor)
                if number:  # the first is to warm up
                    times.setdefault((name, size), []).append(seconds)
    return times


def _slowest(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    dist.barrier()
    began = time.perf_counter()
    call(tensor)
    mine = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return float(mine.item())


class OpenMpi:
    """A small program in C, built once."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "all_reduce"
        source = Path(__file__).with_name("open_mpi_all_reduce.c")
        subprocess.run(["mpicc", "-O2", "-o", self._program, source], check=True)

    @staticmethod
    def present() -> bool:
        """Whether Open MPI and its compiler are on this machine."""
        return shutil.which("mpirun") is not None and shutil.which("mpicc") is not None

    def times(self, peer: Peer, ranks: int, sizes: tuple[int, ...], iterations: int) -> Times:
        """Return the median of each size."""
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        flags = ["--oversubscribe", "--bind-to", "none", "-n", str(ranks), *peer.flags]
        if ranks > len(os.sched_getaffinity(0)):
            flags += ["--mca", "mpi_yield_when_idle", "1"]
        answer = subprocess.run(
            ["mpirun", *flags, self._program, str(iterations), *map(str, sizes)],
            env={**os.environ, **allowed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        rows = [line.split() for line in answer.stdout.splitlines() if line.strip()]
        return {(peer.name, int(size)): [float(us) / 1e6] for size, us in rows}


def _ours(ranks: int, sizes: tuple[int, ...]) -> Times:
    times: Times = spawn_ranks(ranks, on_rank, sizes, 7, timeout_s=300)[0]
    return times


def measured(ranks: int, sizes: tuple[int, ...], rounds: int, mpi: OpenMpi | None) -> Times:
    """Let ours with gloo and Open MPI take turns; return all times."""
    everything: Times = {}
    for number in range(rounds):
        turns = [partial(_ours, ranks, sizes)]
        if mpi is not None:
            turns += [partial(mpi.times, peer, ranks, sizes, 9) for peer in PEERS]
        for turn in turns if number % 2 == 0 else reversed(turns):
            for key, times in turn().items():
                everything.setdefault(key, []).extend(times)
    return everything


def figures_of(
    ranks: int, sizes: tuple[int, ...], times: Times
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return our figures, and those of the others."""
    figures: list[dict[str, object]] = []
    peers: list[dict[str, object]] = []
    medians = {key: statistics.median(values) for key, values in times.items()}
    for size in sizes:
        shown = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        here = {name: seconds for (name, of), seconds in medians.items() if of == size}
        for name, seconds in here.items():
            ours = " over " in name
            title = f"{ranks} ranks, {shown}, {name}"
            row: dict[str, object] = {"name": title, "value": 1e3 * seconds, "unit": "ms"}
            (figures if ours else peers).append(row)
        for transport, limit in (("shm", "< 1"), ("torch", "<= 1.3")):
            best = min(s for name, s in here.items() if name.endswith(f"over {transport}"))
            target = {"target": limit} if size >= 16 * MIB else {}
            title = f"{ranks} ranks, {shown}, best over {transport} / gloo"
            figures.append({"name": title, "value": best / here[GLOO], "unit": "×", **target})
        rivals = [seconds for name, seconds in here.items() if name.startswith("Open MPI")]
        if rivals:
            best = min(s for name, s in here.items() if " over " in name)
            title = f"{ranks} ranks, {shown}, our best / Open MPI's best"
            figures.append({"name": title, "value": best / min(rivals), "unit": "×"})
    return figures, peers


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    sizes = SIZES[1:3] if quick else SIZES
    figures: list[dict[str, object]] = []
    peers: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        mpi = OpenMpi(Path(folder)) if OpenMpi.present() else None
        for ranks in RANKS[:1] if quick else RANKS:
            here = sizes if ranks < 8 else sizes[:3]  # 64 MiB on 8 ranks takes minutes on 2 cores
            times = measured(ranks, here, 1 if quick else ROUNDS, mpi)
            ours, others = figures_of(ranks, here, times)
            figures += ours
            peers += others
    without = (
        "" if mpi else " Open MPI is not installed here (apt install openmpi-bin libopenmpi-dev)."
    )
    return {
        "figures": figures,
        "peers": peers,
        "notes": "All-reduce of float32 in place, one thread per rank, all ranks on one machine. "
        "Each time is that of the slowest rank after a barrier; the median over three rounds of "
        "seven iterations, in which our algorithms and gloo's own take turns one by one. Open MPI "
        "is a C program with its own processes, in turn with them round by round. 'torch' sends "
        "over gloo's sockets, 'shared' through memory of the host. With more ranks than cores "
        "the times depend on who is scheduled when." + without,
    }
