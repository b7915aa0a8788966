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
from meshwright.policy.queue.ask import Ask, Standing, check_asks, speedup
from meshwright.policy.queue.moves import Moves, Policy
from meshwright.policy.queue.nodes import Nodes
from meshwright.policy.queue.pool import Pool
from meshwright.predict.queue.costs import Costs, Drain, Failures
from meshwright.predict.queue.replayed import Looks, Replayed, Sums

_END, _UP, _DOWN, _OPEN, _SHUT, _WAKE = range(6)
_NEVER: Final = math.inf
_DAY_S: Final = 86400.0


def simulate(
    asks: Sequence[Ask],
    run_s: Sequence[float],
    pool: Pool,
    policy: Policy,
    *,
    costs: Costs | None = None,
    failures: Failures | None = None,
    drains: Sequence[Drain] = (),
) -> Replayed:
    """Take jobs through a queue until the last is done; `run_s` is how long each really runs."""
    check_asks(asks, pool.total)
    if len(asks) != len(run_s):
        raise InputError([Problem("run_s", f"{len(run_s)} times are given for {len(asks)} jobs")])
    run = _Run(asks, run_s, pool, policy, costs or Costs())
    if failures is not None or drains:
        run.disturb(failures, drains)
    return run.through()


class _Run:
    """One simulation under way. Jobs are numbered as they arrive."""

    def __init__(
        self, asks: Sequence[Ask], run_s: Sequence[float], pool: Pool, policy: Policy, costs: Costs
    ) -> None:
        self.pool, self.policy, self.costs = pool, policy, costs
        self.order = sorted(range(len(asks)), key=lambda at: asks[at].submit_s)
        self.asks = [asks[at] for at in self.order]
        self.run_s = [float(run_s[at]) for at in self.order]
        self.columns = Replayed(len(asks))
        self.events: list[tuple[float, int, int, int]] = []
        """Time, kind, job or node, and which start of the job it belongs to."""
        self.running: dict[int, Standing] = {}
        self.open = len(asks)
        self.wake_s = _NEVER
        self.failures: Failures | None = None
        self.random = np.random.default_rng(0)

    def disturb(self, failures: Failures | None, drains: Sequence[Drain]) -> None:
        """Let nodes fail and be drained."""
        if not isinstance(self.pool, Nodes):
            what = "GPUs that are only counted have no nodes to fail or to drain"
            raise InputError([Problem("failures", what, "say how many GPUs a node has")])
        if failures is not None:
            self.failures, self.random = failures, np.random.default_rng(failures.seed)
            for node in range(len(self.pool.nodes)):
                self._fails_next(node, self.asks[0].submit_s if self.asks else 0.0)
        for drain in drains:
            heapq.heappush(self.events, (drain.since_s, _SHUT, drain.node, 0))
            heapq.heappush(self.events, (drain.until_s, _OPEN, drain.node, 0))

    def through(self) -> Replayed:
        """Go from moment to moment until no job is left."""
        asks, events, policy, pool = self.asks, self.events, self.policy, self.pool
        count, at = len(asks), 0
        sums, looks = Sums(), Looks(asks)
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
                    sums.waiting_job_s += past_s * waiting
                    sums.pending_s += past_s
                    if free > 0:
                        sums.pending_idle_s += past_s
                        sums.pending_idle_gpu_s += past_s * free
                last_s = now_s
            changed = False
            while events and events[0][0] <= now_s:
                changed |= self._happens(heapq.heappop(events), now_s)
            while next_s <= now_s:
                policy.arrives(Standing(at, asks[at]), now_s)
                at, changed = at + 1, True
                next_s = asks[at].submit_s if at < count else _NEVER
            if changed:
                self._decide(now_s)
                if now_s >= looks.next_s:
                    looks.look(now_s, pool, len(policy))
        return self.columns.finished(self.order, asks, self.run_s, sums, looks)

    def _happens(self, event: tuple[float, int, int, int], now_s: float) -> bool:
        """Let an event happen; return whether the policy has to decide."""
        _, kind, index, tries = event
        if kind == _END:
            job = self.running.get(index)
            if job is None or job.tries != tries:
                return False
            self._settle(job, now_s)
            del self.running[index]
            self.pool.give(job)
            self.policy.ends(job, now_s)
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
        rounds = self.costs.each_round
        if rounds or self.policy.live:
            for job in self.running.values():
                self._settle(job, now_s, job.ask.restart_s if rounds else 0.0)
        moves = self.policy.decide(now_s, self.pool)
        if moves.stops or moves.resized:
            self._interrupt(moves, now_s)
        for job in moves.starts:
            if job.tries == 0:
                self.columns.first_s[job.index] = now_s
            self.running[job.index] = job
            job.pause_s = self.costs.pause_s(job)
            self._sets_off(job, now_s)
        if rounds:
            for job in self.running.values():
                self._sets_off(job, now_s)
        if moves.wake_s < _NEVER and moves.wake_s < self.wake_s:
            self.wake_s = max(moves.wake_s, math.nextafter(now_s, _NEVER))
            heapq.heappush(self.events, (self.wake_s, _WAKE, 0, 0))

    def _interrupt(self, moves: Moves, now_s: float) -> None:
        """Stop jobs, saving what they did, and let others go on elsewhere or in another size."""
        for job in moves.stops:
            self._settle(job, now_s)
            job.tries += 1
            job.kept_s = job.progress_s
            del self.running[job.index]
            self.columns.preempted[job.index] += 1
        for job in moves.resized:
            self._settle(job, now_s)
            job.kept_s = job.progress_s
            job.pause_s = self.costs.pause_s(job)
            self.columns.moved[job.index] += 1
            self._sets_off(job, now_s)

    def _sets_off(self, job: Standing, now_s: float) -> None:
        """Let a job run from now on, as fast as its place and its size allow."""
        ask = job.ask
        rate = 1.0 if job.held == ask.gpus else speedup(ask, job.held)
        if ask.speeds:
            rate *= self.pool.speed(job) if isinstance(self.pool, Nodes) else 1.0
        job.rate = rate
        job.began_s = job.settled_s = now_s
        job.tries += 1
        left_s = (self.run_s[job.index] - job.progress_s) / rate
        end_s = now_s + job.pause_s + max(0.0, left_s)
        heapq.heappush(self.events, (end_s, _END, job.index, job.tries))

    def _settle(self, job: Standing, now_s: float, restart_s: float = 0.0) -> None:
        """Credit a job with what it has done since it was last looked at."""
        past_s = now_s - job.settled_s
        if past_s <= 0:
            return
        job.settled_s = now_s
        job.attained_s += past_s
        job.served_gpu_s += past_s * job.held
        if job.pause_s or restart_s:
            paused_s = min(past_s, job.pause_s + restart_s)
            job.pause_s = max(0.0, job.pause_s - paused_s)
            self.columns.paused_gpu_s[job.index] += paused_s * job.held
            past_s -= paused_s
        job.progress_s += past_s * job.rate

    def _node_changes(self, kind: int, node: int, now_s: float) -> None:
        pool = self.pool
        assert isinstance(pool, Nodes), "only nodes fail"
        if kind == _SHUT:
            pool.shut(node)
        elif kind == _OPEN:
            pool.open(node)
        elif kind == _UP:
            pool.up(node)
            self._fails_next(node, now_s)
        else:
            for job in [one for one in self.running.values() if pool.uses(one, node)]:
                self._falls(job, now_s)
            pool.down(node)
            assert self.failures is not None
            heapq.heappush(self.events, (now_s + self.failures.repair_s, _UP, node, 0))

    def _falls(self, job: Standing, now_s: float) -> None:
        """Let a job lose its node, and what no checkpoint has."""
        self._settle(job, now_s)
        kept_s = self.costs.kept_s(job)
        self.columns.lost_gpu_s[job.index] += (job.progress_s - kept_s) / job.rate * job.held
        job.progress_s = job.kept_s = kept_s
        job.tries += 1
        del self.running[job.index]
        self.pool.give(job)
        self.columns.failed[job.index] += 1
        self.policy.ends(job, now_s)
        self.policy.arrives(job, now_s)

    def _fails_next(self, node: int, now_s: float) -> None:
        assert self.failures is not None
        if self.failures.per_node_day > 0:
            after_s = float(self.random.exponential(_DAY_S / self.failures.per_node_day))
            heapq.heappush(self.events, (now_s + after_s, _DOWN, node, 0))

    def _stuck(self) -> None:
        what = f"{self.open} jobs wait for GPUs that never come free together"
        fix = "use a placement that may split jobs, larger nodes, or leave those jobs out"
        raise InputError([Problem("jobs", what, fix)])
