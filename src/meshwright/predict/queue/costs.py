"""What stopping and going on costs jobs, and how often nodes fail."""

import msgspec

from meshwright.policy.queue.ask import Standing


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Time that goes by without progress, beside what an ask says of its own restart."""

    start_s: float = 0.0
    """At each start."""
    save_s: float = 0.0
    """When a job is stopped for another; counted when it goes on."""
    restore_s: float = 0.0
    """When it goes on."""
    saved_every_s: float | None = None
    """Work between checkpoints; None: a job is saved only when it is stopped for another."""
    each_round: bool = False
    """Whether every decision restarts everything that runs: each job then loses its own
    `restart_s` of what it did since the decision before, as in Muri's simulator."""

    def pause_s(self, job: Standing) -> float:
        """Return how long a job that starts now makes no progress."""
        pause = self.start_s
        if not self.each_round:
            pause += job.ask.restart_s
        if job.progress_s > 0:
            pause += self.save_s + self.restore_s
        return pause

    def kept_s(self, job: Standing) -> float:
        """Return the work that is left of a job whose node fails."""
        if self.saved_every_s is None:
            return job.kept_s
        return max(job.kept_s, job.progress_s // self.saved_every_s * self.saved_every_s)


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes fail: each by itself, at a steady rate."""

    per_node_day: float
    """Failures of one node in a day (Meta's RSC-1: 0.0065)."""
    repair_s: float = 4 * 3600.0
    """How long a node is away."""
    seed: int = 0
    """What the failures are drawn from."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes no new jobs for a while; those on it run to their end."""

    node: int
    since_s: float
    until_s: float
