"""A queue on a virtual clock: the policy decides, jobs run, and every moment is accounted for.

What happens at the same moment is folded into one decision: ends and failures first, then arrivals.
Between two moments nothing changes, so that sums over time are exact.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue.job import JobRequest, QueuedJob, check_requests, speedup
from meshwright.policy.job_queue.policy import QueueDecision, QueuePolicy
from meshwright.policy.job_queue.pool.node_pool import NodePool
from meshwright.policy.job_queue.pool.pool import GpuPool
from meshwright.predict.job_queue.costs import NodeDrain, NodeFailures, PreemptionCosts
from meshwright.predict.job_queue.replay import QueueReplay, ReplayTotals, StateSamples

_END, _UP, _DOWN, _OPEN, _SHUT, _WAKE = range(6)
_NEVER: Final = math.inf
_DAY_S: Final = 86400.0


def simulate_queue(
    asks: Sequence[JobRequest],
    run_s: Sequence[float],
    pool: GpuPool,
    policy: QueuePolicy,
    *,
    costs: PreemptionCosts | None = None,
    failures: NodeFailures | None = None,
    drains: Sequence[NodeDrain] = (),
) -> QueueReplay:
    """Take jobs through a queue until the last is done; `run_s` is how long each really runs."""
    check_requests(asks, pool.total)
    if len(asks) != len(run_s):
        raise InputError([Problem("run_s", f"{len(run_s)} times are given for {len(asks)} jobs")])
    run = _Run(asks, run_s, pool, policy, costs or PreemptionCosts())
    if failures is not None or drains:
        run.disturb(failures, drains)
    return run.through()


class _Run:
    """One simulation under way. Jobs are numbered as they arrive."""

    def __init__(
        self,
        asks: Sequence[JobRequest],
        run_s: Sequence[float],
        pool: GpuPool,
        policy: QueuePolicy,
        costs: PreemptionCosts,
    ) -> None:
        self.pool, self.policy, self.costs = pool, policy, costs
        self.order = sorted(range(len(asks)), key=lambda at: asks[at].submit_s)
        self.asks = [asks[at] for at in self.order]
        self.run_s = [float(run_s[at]) for at in self.order]
        self.columns = QueueReplay(len(asks))
        self.events: list[tuple[float, int, int, int]] = []
        """Time, kind, job or node, and which start of the job it belongs to."""
        self.running: dict[int, QueuedJob] = {}
        self.open = len(asks)
        self.wake_s = _NEVER
        self.failures: NodeFailures | None = None
        self.random = np.random.default_rng(0)

    def disturb(self, failures: NodeFailures | None, drains: Sequence[NodeDrain]) -> None:
        """Let nodes fail and be drained."""
        if not isinstance(self.pool, NodePool):
            what = "GPUs that are only counted have no nodes to fail or to drain"
            raise InputError([Problem("failures", what, "say how many GPUs a node has")])
        if failures is not None:
            self.failures, self.random = failures, np.random.default_rng(failures.seed)
            for node in range(len(self.pool.nodes)):
                self._fails_next(node, self.asks[0].submit_s if self.asks else 0.0)
        for drain in drains:
            heapq.heappush(self.events, (drain.since_s, _SHUT, drain.node, 0))
            heapq.heappush(self.events, (drain.until_s, _OPEN, drain.node, 0))

    def through(self) -> QueueReplay:
        """Go from moment to moment until no job is left."""
        asks, events, policy, pool = self.asks, self.events, self.policy, self.pool
        count, at = len(asks), 0
        sums, looks = ReplayTotals(), StateSamples(asks)
        next_s = last_s = asks[0].submit_s if count else _NEVER
        while self.open:
            now_s = next_s
            if events and events[0][0] < now_s:
                now_s = events[0][0]
            if now_s == _NEVER:
                self._stuck()
            past_s = now_s - last_s
            if past_s > 0:
                free = pool.free
                sums.capacity_gpu_s += past_s * pool.total
                sums.free_gpu_s += past_s * free
                waiting = len(policy)
                if waiting:
                    sums.pending_job_s += past_s * waiting
                    sums.pending_s += past_s
                    if free > 0:
                        sums.pending_idle_s += past_s
                        sums.pending_idle_gpu_s += past_s * free
                last_s = now_s
            changed = False
            while events and events[0][0] <= now_s:
                changed |= self._happens(heapq.heappop(events), now_s)
            while next_s <= now_s:
                policy.on_submit(QueuedJob(at, asks[at]), now_s)
                at, changed = at + 1, True
                next_s = asks[at].submit_s if at < count else _NEVER
            if changed:
                self._decide(now_s)
                if now_s >= looks.next_s:
                    looks.sample(now_s, pool, len(policy))
        return self.columns.finalize(self.order, asks, self.run_s, sums, looks)

    def _happens(self, event: tuple[float, int, int, int], now_s: float) -> bool:
        """Let an event happen; return whether the policy has to decide."""
        _, kind, index, tries = event
        if kind == _END:
            job = self.running.get(index)
            if job is None or job.num_starts != tries:
                return False
            self._settle(job, now_s)
            del self.running[index]
            self.pool.release(job)
            self.policy.on_end(job, now_s)
            self.columns.end_s[index] = now_s
            self.columns.served_gpu_s[index] = job.served_gpu_s
            self.open -= 1
        elif kind == _WAKE:
            if now_s < self.wake_s:
                return False
            self.wake_s = _NEVER
        else:
            self._node_changes(kind, index, now_s)
        return True

    def _decide(self, now_s: float) -> None:
        """Ask the policy, and do what it says."""
        rounds = self.costs.restart_every_round
        if rounds or self.policy.needs_job_progress:
            for job in self.running.values():
                self._settle(job, now_s, job.request.restart_cost_s if rounds else 0.0)
        moves = self.policy.decide(now_s, self.pool)
        if moves.preemptions or moves.resizes:
            self._interrupt(moves, now_s)
        for job in moves.starts:
            if job.num_starts == 0:
                self.columns.first_s[job.index] = now_s
            self.running[job.index] = job
            job.startup_left_s = self.costs.compute_pause_s(job)
            self._sets_off(job, now_s)
        if rounds:
            for job in self.running.values():
                self._sets_off(job, now_s)
        if moves.wake_s < _NEVER and moves.wake_s < self.wake_s:
            self.wake_s = max(moves.wake_s, math.nextafter(now_s, _NEVER))
            heapq.heappush(self.events, (self.wake_s, _WAKE, 0, 0))

    def _interrupt(self, moves: QueueDecision, now_s: float) -> None:
        """Stop jobs, saving what they did, and let others go on elsewhere or in another size."""
        for job in moves.preemptions:
            self._settle(job, now_s)
            job.num_starts += 1
            job.checkpointed_s = job.progress_s
            del self.running[job.index]
            self.columns.preempted[job.index] += 1
        for job in moves.resizes:
            self._settle(job, now_s)
            job.checkpointed_s = job.progress_s
            job.startup_left_s = self.costs.compute_pause_s(job)
            self.columns.moved[job.index] += 1
            self._sets_off(job, now_s)

    def _sets_off(self, job: QueuedJob, now_s: float) -> None:
        """Let a job run from now on, as fast as its place and its size allow."""
        ask = job.request
        rate = 1.0 if job.allocated_gpus == ask.gpus else speedup(ask, job.allocated_gpus)
        if ask.speed_by_gpu_kind:
            rate *= self.pool.find_job_speed(job) if isinstance(self.pool, NodePool) else 1.0
        job.progress_rate = rate
        job.start_s = job.updated_s = now_s
        job.num_starts += 1
        left_s = (self.run_s[job.index] - job.progress_s) / rate
        end_s = now_s + job.startup_left_s + max(0.0, left_s)
        heapq.heappush(self.events, (end_s, _END, job.index, job.num_starts))

    def _settle(self, job: QueuedJob, now_s: float, restart_s: float = 0.0) -> None:
        """Credit a job with what it has done since it was last looked at."""
        past_s = now_s - job.updated_s
        if past_s <= 0:
            return
        job.updated_s = now_s
        job.attained_s += past_s
        job.served_gpu_s += past_s * job.allocated_gpus
        if job.startup_left_s or restart_s:
            paused_s = min(past_s, job.startup_left_s + restart_s)
            job.startup_left_s = max(0.0, job.startup_left_s - paused_s)
            self.columns.paused_gpu_s[job.index] += paused_s * job.allocated_gpus
            past_s -= paused_s
        job.progress_s += past_s * job.progress_rate

    def _node_changes(self, kind: int, node: int, now_s: float) -> None:
        pool = self.pool
        assert isinstance(pool, NodePool), "only nodes fail"
        if kind == _SHUT:
            pool.drain(node)
        elif kind == _OPEN:
            pool.resume(node)
        elif kind == _UP:
            pool.restore(node)
            self._fails_next(node, now_s)
        else:
            for job in [one for one in self.running.values() if pool.runs_on(one, node)]:
                self._falls(job, now_s)
            pool.fail(node)
            assert self.failures is not None
            heapq.heappush(self.events, (now_s + self.failures.repair_s, _UP, node, 0))

    def _falls(self, job: QueuedJob, now_s: float) -> None:
        """Let a job lose its node, and what no checkpoint has."""
        self._settle(job, now_s)
        kept_s = self.costs.compute_checkpointed_s(job)
        self.columns.lost_gpu_s[job.index] += (
            (job.progress_s - kept_s) / job.progress_rate * job.allocated_gpus
        )
        job.progress_s = job.checkpointed_s = kept_s
        job.num_starts += 1
        del self.running[job.index]
        self.pool.release(job)
        self.columns.failed[job.index] += 1
        self.policy.on_end(job, now_s)
        self.policy.on_submit(job, now_s)

    def _fails_next(self, node: int, now_s: float) -> None:
        assert self.failures is not None
        if self.failures.failures_per_node_day > 0:
            after_s = float(self.random.exponential(_DAY_S / self.failures.failures_per_node_day))
            heapq.heappush(self.events, (now_s + after_s, _DOWN, node, 0))

    def _stuck(self) -> None:
        what = f"{self.open} jobs wait for GPUs that never come free together"
        fix = "use a placement that may split jobs, larger nodes, or leave those jobs out"
        raise InputError([Problem("jobs", what, fix)])
