"""What each launcher tells its processes in the environment, under its own names.

torchrun    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
Slurm       SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE, in a step of srun
Open MPI    OMPI_COMM_WORLD_RANK …_SIZE …_LOCAL_RANK …_LOCAL_SIZE
Kubernetes  JOB_COMPLETION_INDEX of a pod of an indexed Job (a JobSet's are), or RANK of a
            PyTorchJob's pod: one process to a pod, unless torchrun starts more
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster.hostlist import expand

FIRST_PORT, PORTS = 20000, 12000
"""Ports of jobs under Slurm: below those that Linux hands out itself (32768 and up)."""

OUTER = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "JOB_COMPLETION_INDEX",
)  # fmt: skip
"""What says which process of an outer launcher this is; those it starts are others."""


class Place(NamedTuple):
    """What one launcher says; None is what it does not."""

    launcher: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None


class Variables:
    """An environment whose numbers are read, with the problems of all that are none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: list[Problem] = []

    def text(self, name: str) -> str | None:
        """Return a variable; one that is empty counts as unset."""
        return self._environment.get(name) or None

    def number(self, name: str) -> int | None:
        """Return a variable that has to be a whole number."""
        text = self.text(name)
        if text is None:
            return None
        if text.isascii() and text.isdecimal() and len(text) <= 9:
            return int(text)
        fix = "unset it, or let the launcher set it"
        self.problems.append(Problem(name, f"{text!r} is not a whole number", fix))
        return None


def torchrun(given: Variables) -> Place | None:
    """Read what torchrun sets, and everything that follows its example."""
    place = Place(
        "torchrun",
        given.number("RANK"),
        given.number("WORLD_SIZE"),
        given.number("LOCAL_RANK"),
        given.number("LOCAL_WORLD_SIZE"),
        given.text("MASTER_ADDR"),
        given.number("MASTER_PORT"),
    )
    return place if (place.rank, place.size) != (None, None) else None


def slurm(given: Variables) -> Place | None:
    """Read what srun sets; the batch script itself is no task, though it has some variables."""
    step = given.text("SLURM_STEP_ID") or given.text("SLURM_STEPID")
    if step is None or not step.isdecimal() or given.text("SLURM_PROCID") is None:
        return None
    nodes = given.text("SLURM_STEP_NODELIST") or given.text("SLURM_JOB_NODELIST")
    job = given.number("SLURM_JOB_ID")
    return Place(
        "Slurm",
        given.number("SLURM_PROCID"),
        given.number("SLURM_STEP_NUM_TASKS") or given.number("SLURM_NTASKS"),
        given.number("SLURM_LOCALID"),
        _tasks_here(given),
        expand(nodes, "SLURM_STEP_NODELIST")[0] if nodes else None,
        None if job is None else slurm_port(job),
    )


def slurm_port(job: int) -> int:
    """Return the port of a job, so that jobs which share a node rarely share it."""
    return FIRST_PORT + job % PORTS


def open_mpi(given: Variables) -> Place | None:
    """Read what mpirun sets; it names no address."""
    if given.text("OMPI_COMM_WORLD_RANK") is None:
        return None
    size = given.number("OMPI_COMM_WORLD_SIZE")
    local_size = given.number("OMPI_COMM_WORLD_LOCAL_SIZE")
    return Place(
        "Open MPI",
        given.number("OMPI_COMM_WORLD_RANK"),
        size,
        given.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size,
        "127.0.0.1" if size is not None and size == local_size else None,
    )


def kubernetes(given: Variables) -> Place | None:
    """Read what a pod of an indexed Job or a PyTorchJob has: one process, one rank."""
    index = given.number("JOB_COMPLETION_INDEX")
    if given.text("KUBERNETES_SERVICE_HOST") is None and index is None:
        return None
    each = given.text("PET_NPROC_PER_NODE") or "1"
    if each != "1" and given.text("LOCAL_RANK") is None:
        what = f"asks for {each} processes in this pod, and one was started"
        fix = "let the pod's command be torchrun -m meshwright train JOB"
        given.problems.append(Problem("PET_NPROC_PER_NODE", what, fix))
    rank = index if given.text("RANK") is None else given.number("RANK")
    if rank is None:
        return None
    return Place("Kubernetes", rank, given.number("WORLD_SIZE"), 0, 1)


READERS: tuple[Callable[[Variables], Place | None], ...] = (torchrun, slurm, open_mpi, kubernetes)
"""In the order in which they are believed: the innermost first."""


def _tasks_here(given: Variables) -> int | None:
    """Count the tasks on this node from a text such as `4(x2),3`."""
    text = given.text("SLURM_STEP_TASKS_PER_NODE") or given.text("SLURM_TASKS_PER_NODE")
    node = given.number("SLURM_NODEID")
    if text is None or node is None:
        return None
    counts: list[int] = []
    try:
        for part in text.split(","):
            count, _, times = part.partition("(x")
            counts += [int(count)] * int(times.rstrip(")") or 1)
    except ValueError:
        raise InputError([Problem("SLURM_TASKS_PER_NODE", f"{text!r} cannot be read")]) from None
    return counts[node] if node < len(counts) else None
