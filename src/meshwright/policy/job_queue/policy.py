"""`QueuePolicy`: what decides who runs. It is told of jobs and asked when something has changed.

A policy knows no clock: the time is handed in. It gives GPUs away through a pool and says what it
did; whoever drives it starts and stops the jobs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.pool.pool import GpuPool


class QueueDecision(NamedTuple):
    """What a policy has decided; places are already taken and given back."""

    starts: Sequence[QueuedJob] = ()
    """Jobs that begin or go on."""
    preemptions: Sequence[QueuedJob] = ()
    """Jobs that ran and have to wait again."""
    resizes: Sequence[QueuedJob] = ()
    """Jobs that go on with another number of GPUs, or in another place."""
    wake_s: float = math.inf
    """When to ask again even if nothing happens until then."""


NO_DECISION = QueueDecision()


class QueuePolicy(Protocol):
    """Who goes when."""

    needs_job_progress: bool
    """Whether progress of running jobs has to be up to date when it decides."""

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait: a new one, or one whose node failed."""

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Forget a job that runs no longer; its place has been given back."""

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Decide who starts and who stops."""

    def __len__(self) -> int:
        """Count the jobs that wait."""
