"""What stopping and going on costs jobs, and how often nodes fail."""

import msgspec

from meshwright.policy.job_queue.job import QueuedJob


class PreemptionCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Time that goes by without progress, beside what an ask says of its own restart."""

    startup_s: float = 0.0
    """At each start."""
    checkpoint_s: float = 0.0
    """When a job is stopped for another; counted when it goes on."""
    restore_s: float = 0.0
    """When it goes on."""
    checkpoint_interval_s: float | None = None
    """Work between checkpoints; None: a job is saved only when it is stopped for another."""
    restart_every_round: bool = False
    """Whether every decision restarts everything that runs: each job then loses its own
    `restart_s` of what it did since the decision before, as in Muri's simulator."""

    def compute_pause_s(self, job: QueuedJob) -> float:
        """Return how long a job that starts now makes no progress."""
        pause = self.startup_s
        if not self.restart_every_round:
            pause += job.request.restart_cost_s
        if job.progress_s > 0:
            pause += self.checkpoint_s + self.restore_s
        return pause

    def compute_checkpointed_s(self, job: QueuedJob) -> float:
        """Return the work that is left of a job whose node fails."""
        if self.checkpoint_interval_s is None:
            return job.checkpointed_s
        return max(
            job.checkpointed_s,
            job.progress_s // self.checkpoint_interval_s * self.checkpoint_interval_s,
        )


class NodeFailures(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes fail: each by itself, at a steady rate."""

    failures_per_node_day: float
    """Failures of one node in a day (Meta's RSC-1: 0.0065)."""
    repair_s: float = 4 * 3600.0
    """How long a node is away."""
    seed: int = 0
    """What the failures are drawn from."""


class NodeDrain(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes no new jobs for a while; those on it run to their end."""

    node: int
    since_s: float
    until_s: float
