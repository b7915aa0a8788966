"""`JobRequest`: what a job asks of a cluster; `QueuedJob`: how it stands in the queue.

An ask is all that a scheduler may know. How long a job really runs is known to whoever drives the
queue; `estimate_s` is what a user, a limit or a predictor says beforehand.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is handed in."""

    job_id: str
    """Its name among all jobs."""
    submit_s: float
    """When it is handed in."""
    gpus: float
    """GPUs it runs on, all of them at once; a part of one is allowed where GPUs are shared."""
    estimate_s: float = math.inf
    """How long it is expected to run: a limit, a prediction, or the truth for an oracle."""
    user: str = ""
    """Who handed it in."""
    team: str = ""
    """Whose quota and whose share it counts to."""
    name: str = ""
    """What it is called by its user; runs of the same name are alike."""
    priority: float = 0.0
    """The higher goes first, where priorities count."""
    gpu_kinds: tuple[str, ...] = ()
    """Kinds of GPU that will do; empty: any."""
    cpus: float = 0.0
    """Cores it needs."""
    memory_bytes: float = 0.0
    """Bytes of host memory it needs."""
    min_gpus: float | None = None
    """The fewest it runs on, where it can shrink; None: as many as it asks for."""
    max_gpus: float | None = None
    """The most it can use, where it can grow; None: as many as it asks for."""
    serial_fraction: float = 0.0
    """Share of a step that more GPUs do not shorten (Amdahl), for jobs that change their size."""
    speed_by_gpu_kind: dict[str, float] = {}
    """How fast it is on a kind of GPU, 1 being the speed that its duration was measured at."""
    restart_cost_s: float = 0.0
    """Seconds without progress whenever it starts or goes on."""
    deadline_s: float | None = None
    """When it should be done."""


class QueuedJob:
    """A job in the queue: what it asks, holds and has done so far.

    Whoever drives the queue keeps `progress_s`, `attained_s` and `served_gpu_s` up to date;
    policies read them and change only `placement`, `allocated_gpus` and `expected_end_s`, through a
    pool.
    """

    __slots__ = (
        "allocated_gpus",
        "attained_s",
        "checkpointed_s",
        "estimate_s",
        "expected_end_s",
        "gpus",
        "index",
        "num_starts",
        "placement",
        "policy_state",
        "progress_rate",
        "progress_s",
        "request",
        "served_gpu_s",
        "shape",
        "start_s",
        "startup_left_s",
        "updated_s",
    )  # fmt: skip

    def __init__(self, index: int, request: JobRequest) -> None:
        """Stand at the end of the queue; `index` is the order in which jobs came."""
        self.index, self.request = index, request
        self.gpus, self.estimate_s = request.gpus, request.estimate_s
        self.shape = (request.gpus, request.gpu_kinds, request.cpus, request.memory_bytes)
        """What decides whether it fits; jobs of one shape fit alike."""
        self.placement: Any = None
        """Where it runs, in the words of the pool; None while it waits."""
        self.allocated_gpus = 0.0
        """GPUs it has now."""
        self.start_s = self.updated_s = self.expected_end_s = 0.0
        self.progress_s = self.checkpointed_s = 0.0
        """Seconds of work that are done, at the size it asked for; and that a checkpoint has."""
        self.attained_s = self.served_gpu_s = 0.0
        """Time it has run, and GPU-seconds it has had."""
        self.startup_left_s, self.progress_rate = 0.0, 1.0
        """What is left of its start-up, and its progress per second after it."""
        self.policy_state: Any = 0
        """Room for a policy to keep a place in its order."""
        self.num_starts = 0
        """How often it started."""

    @property
    def remaining_s(self) -> float:
        """Seconds it is still expected to take at the size it asked for, never less than none."""
        return max(0.0, self.estimate_s - self.progress_s)


def speedup(ask: JobRequest, gpus: float) -> float:
    """Return the speed on `gpus` over that on as many as it asked for, by Amdahl's law."""
    share = ask.serial_fraction
    return (share + (1 - share) / ask.gpus) / (share + (1 - share) / gpus)


def check_requests(asks: Sequence[JobRequest], gpus: float) -> None:
    """Refuse jobs that no scheduler could ever start on `gpus`, all of them at once."""
    problems = []
    most = max((ask.min_gpus or ask.gpus for ask in asks), default=0.0)
    for ask in asks:
        if not (math.isfinite(ask.submit_s) and 0 < ask.gpus < math.inf):
            what = f"it asks for {ask.gpus:g} GPUs at {ask.submit_s:g} s"
            problems.append(Problem(f"job {ask.job_id}", what, "leave it out"))
        elif (ask.min_gpus or ask.gpus) > gpus:
            what = f"it asks for {ask.gpus:g} GPUs and there are {gpus:g}"
            fix = f"leave it out, or add GPUs: the largest job needs {most:g}"
            problems.append(Problem(f"job {ask.job_id}", what, fix))
        if len(problems) == 5:
            break
    if problems:
        raise InputError(problems)
