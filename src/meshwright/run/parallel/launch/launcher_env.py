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
from meshwright.spec.cluster.hostlist import expand_hostlist

FIRST_PORT, NUM_PORTS = 20000, 12000
"""Ports of jobs under Slurm: below those that Linux hands out itself (32768 and up)."""

SLURM_TASK_VARIABLES = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "JOB_COMPLETION_INDEX",
)  # fmt: skip
"""What says which process of an outer launcher this is; those it starts are others."""


class LauncherInfo(NamedTuple):
    """What one launcher says; None is what it does not."""

    launcher: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None


class EnvironmentReader:
    """An environment whose numbers are read, with the problems of all that are none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: list[Problem] = []

    def read_text(self, name: str) -> str | None:
        """Return a variable; one that is empty counts as unset."""
        return self._environment.get(name) or None

    def read_number(self, name: str) -> int | None:
        """Return a variable that has to be a whole number."""
        text = self.read_text(name)
        if text is None:
            return None
        if text.isascii() and text.isdecimal() and len(text) <= 9:
            return int(text)
        fix = "unset it, or let the launcher set it"
        self.problems.append(Problem(name, f"{text!r} is not a whole number", fix))
        return None


def read_torchrun(given: EnvironmentReader) -> LauncherInfo | None:
    """Read what torchrun sets, and everything that follows its example."""
    place = LauncherInfo(
        "torchrun",
        given.read_number("RANK"),
        given.read_number("WORLD_SIZE"),
        given.read_number("LOCAL_RANK"),
        given.read_number("LOCAL_WORLD_SIZE"),
        given.read_text("MASTER_ADDR"),
        given.read_number("MASTER_PORT"),
    )
    return place if (place.rank, place.size) != (None, None) else None


def read_slurm(given: EnvironmentReader) -> LauncherInfo | None:
    """Read what srun sets; the batch script itself is no task, though it has some variables."""
    step = given.read_text("SLURM_STEP_ID") or given.read_text("SLURM_STEPID")
    if step is None or not step.isdecimal() or given.read_text("SLURM_PROCID") is None:
        return None
    nodes = given.read_text("SLURM_STEP_NODELIST") or given.read_text("SLURM_JOB_NODELIST")
    job = given.read_number("SLURM_JOB_ID")
    return LauncherInfo(
        "Slurm",
        given.read_number("SLURM_PROCID"),
        given.read_number("SLURM_STEP_NUM_TASKS") or given.read_number("SLURM_NTASKS"),
        given.read_number("SLURM_LOCALID"),
        _tasks_here(given),
        expand_hostlist(nodes, "SLURM_STEP_NODELIST")[0] if nodes else None,
        None if job is None else derive_slurm_master_port(job),
    )


def derive_slurm_master_port(job: int) -> int:
    """Return the port of a job, so that jobs which share a node rarely share it."""
    return FIRST_PORT + job % NUM_PORTS


def read_openmpi(given: EnvironmentReader) -> LauncherInfo | None:
    """Read what mpirun sets; it names no address."""
    if given.read_text("OMPI_COMM_WORLD_RANK") is None:
        return None
    size = given.read_number("OMPI_COMM_WORLD_SIZE")
    local_size = given.read_number("OMPI_COMM_WORLD_LOCAL_SIZE")
    return LauncherInfo(
        "Open MPI",
        given.read_number("OMPI_COMM_WORLD_RANK"),
        size,
        given.read_number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size,
        "127.0.0.1" if size is not None and size == local_size else None,
    )


def read_kubernetes(given: EnvironmentReader) -> LauncherInfo | None:
    """Read what a pod of an indexed Job or a PyTorchJob has: one process, one rank."""
    index = given.read_number("JOB_COMPLETION_INDEX")
    if given.read_text("KUBERNETES_SERVICE_HOST") is None and index is None:
        return None
    each = given.read_text("PET_NPROC_PER_NODE") or "1"
    if each != "1" and given.read_text("LOCAL_RANK") is None:
        what = f"asks for {each} processes in this pod, and one was started"
        fix = "let the pod's command be torchrun -m meshwright train JOB"
        given.problems.append(Problem("PET_NPROC_PER_NODE", what, fix))
    rank = index if given.read_text("RANK") is None else given.read_number("RANK")
    if rank is None:
        return None
    return LauncherInfo("Kubernetes", rank, given.read_number("WORLD_SIZE"), 0, 1)


LAUNCHER_READERS: tuple[Callable[[EnvironmentReader], LauncherInfo | None], ...] = (
    read_torchrun,
    read_slurm,
    read_openmpi,
    read_kubernetes,
)
"""In the order in which they are believed: the innermost first."""


def _tasks_here(given: EnvironmentReader) -> int | None:
    """Count the tasks on this node from a text such as `4(x2),3`."""
    text = given.read_text("SLURM_STEP_TASKS_PER_NODE") or given.read_text("SLURM_TASKS_PER_NODE")
    node = given.read_number("SLURM_NODEID")
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
