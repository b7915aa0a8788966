"""Least attained service, without knowing how long jobs run: Tiresias' queues and Gittins' index.

Jobs sink from queue to queue as they are served (time × GPUs). In a queue those who run stay ahead
of those who wait, so that nobody is stopped without need; or those go first who are likeliest to be
done soon, judged by how long earlier jobs took. Tiresias: Gu et al., NSDI 2019.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policies.preemptive_order import PreemptiveOrderPolicy
from meshwright.policy.job_queue.policy import QueueDecision
from meshwright.policy.job_queue.pool.pool import GpuPool

QUEUE_THRESHOLDS_GPU_S = (3250.0, 7200.0)
"""GPU-seconds after which a job sinks, as in Tiresias' and Muri's simulators."""


class LeastAttainedServicePolicy(PreemptiveOrderPolicy):
    """Queues by attained service, the least first."""

    def __init__(
        self,
        limits_gpu_s: Sequence[float] = QUEUE_THRESHOLDS_GPU_S,
        *,
        past_gpu_s: Sequence[float] = (),
        promote: float | None = None,
        moving: bool = False,
    ) -> None:
        """Sink at `limits_gpu_s`.

        With `past_gpu_s`, what earlier jobs took in all, Gittins' index decides within a queue.
        A job that has waited `promote` times as long as it ran comes back to the first queue.
        """
        super().__init__(self._key, moving=moving)
        if list(limits_gpu_s) != sorted(limits_gpu_s):
            what = f"{', '.join(f'{limit:g}' for limit in limits_gpu_s)} do not rise"
            raise InputError([Problem("limits", what, "give the least first")])
        self.thresholds_gpu_s = tuple(limits_gpu_s)
        self.gittins = GittinsIndex(past_gpu_s) if past_gpu_s else None
        self.promote = promote
        self.turn = 0

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait at the end of its queue."""
        super().on_submit(job, now_s)
        self.turn += 1
        if job.attained_s == 0:
            job.policy_state = _Rank(queue=0, turn=self.turn, since_s=now_s)
        else:  # its node failed
            job.policy_state.turn, job.policy_state.since_s = self.turn, now_s

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Let jobs sink, choose, and say when the next one sinks."""
        for job in self.jobs.values():
            self._sink(job) if job.placement is not None else self._rise(job, now_s)
        moves = super().decide(now_s, pool)
        for job in moves.preemptions:
            job.policy_state.since_s = now_s
        # Those who wait go behind those who run, in the order they have.
        waiting = [job for job in self.jobs.values() if job.placement is None]
        for job in sorted(waiting, key=lambda one: one.policy_state.turn):
            self.turn += 1
            job.policy_state.turn = self.turn
        return moves._replace(wake_s=self._next_s(now_s))

    def _key(self, job: QueuedJob) -> tuple[Any, ...]:
        queue = job.policy_state.queue
        if self.gittins is None:
            return queue, job.policy_state.turn
        return queue, -self.gittins.compute_index(job.served_gpu_s), job.request.submit_s

    def _sink(self, job: QueuedJob) -> None:
        while job.policy_state.queue < len(self.thresholds_gpu_s) and (
            self._served(job) >= self.thresholds_gpu_s[job.policy_state.queue]
        ):
            self.turn += 1
            job.policy_state.queue += 1
            job.policy_state.turn = self.turn

    @staticmethod
    def _served(job: QueuedJob) -> float:
        return float(job.served_gpu_s - job.policy_state.forgiven_gpu_s)

    def _rise(self, job: QueuedJob, now_s: float) -> None:
        rank = job.policy_state
        if self.promote is None or rank.queue == 0 or job.attained_s == 0:
            return
        ran_s = self._served(job) / job.gpus
        if now_s - rank.since_s >= self.promote * ran_s:
            rank.forgiven_gpu_s, rank.since_s = job.served_gpu_s, now_s
            self.turn += 1
            rank.queue, rank.turn = 0, self.turn

    def _next_s(self, now_s: float) -> float:
        found = math.inf
        for job in self.jobs.values():
            rank = job.policy_state
            if job.placement is not None:
                if rank.queue < len(self.thresholds_gpu_s):
                    # Whole seconds: a simulator that rounds down would ask again and again.
                    ran_s = self._served(job) / job.gpus
                    lasts_s = math.ceil(self.thresholds_gpu_s[rank.queue] / job.gpus) - ran_s
                    found = min(found, now_s + lasts_s)
            elif self.promote is not None and rank.queue and job.attained_s:
                lasts_s = self.promote * self._served(job) / job.gpus
                found = min(found, max(now_s + 1, rank.since_s + lasts_s))
        return found


class _Rank:
    """Where a job stands among the queues."""

    __slots__ = ("forgiven_gpu_s", "queue", "since_s", "turn")

    def __init__(self, queue: int, turn: int, since_s: float) -> None:
        self.queue, self.turn, self.since_s = queue, turn, since_s
        self.forgiven_gpu_s = 0.0


class GittinsIndex:
    """How likely a job is to end soon for what it would take, given how long others took.

    The index at service `a` is the largest over all amounts `d` of
    P(ends within a+d | reached a) / E[min(rest, d) | reached a]. Only amounts that end at a past
    job can be best.
    """

    def __init__(self, past_gpu_s: Sequence[float], points: int = 200) -> None:
        """Learn from what earlier jobs took; at most `points` of them, evenly chosen, are kept."""
        past = sorted(past_gpu_s)
        step = max(1, len(past) // points)
        self.past = past[::step] if past[::step][-1] == past[-1] else [*past[::step], past[-1]]
        self._indexes = [self._at(at) for at in range(len(self.past))]

    def compute_index(self, served_gpu_s: float) -> float:
        """Return the index of a job that has been served so much."""
        at = bisect_right(self.past, served_gpu_s)
        return self._indexes[at] if at < len(self.past) else 0.0

    def _at(self, first: int) -> float:
        served = self.past[first - 1] if first else 0.0
        rest = [total - served for total in self.past[first:]]
        best, ended_gpu_s = 0.0, 0.0
        for done, left in enumerate(rest, start=1):
            ended_gpu_s += left
            cost = ended_gpu_s + (len(rest) - done) * left
            best = max(best, done / cost if cost else math.inf)
        return best
