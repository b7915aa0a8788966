"""Priorities with preemption: a job may stop others of lower priority, no more than it needs."""

from collections.abc import Iterable

from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policy import NO_DECISION, QueueDecision
from meshwright.policy.job_queue.pool.pool import GpuPool


class PreemptivePriorityPolicy:
    """Highest priority first; ties by arrival. Whoever fits may pass those who do not."""

    needs_job_progress = True

    def __init__(self, *, gap: float = 0.0, skip: bool = True) -> None:
        """Stop only jobs whose priority is lower by more than `gap`; with `skip`, scan on."""
        self.gap, self.skip = gap, skip
        self.waiting: dict[int, QueuedJob] = {}
        self.running: dict[int, QueuedJob] = {}

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return len(self.waiting)

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        self.waiting[job.index] = job

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Forget a job that ran."""
        del now_s
        del self.running[job.index]

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Start by priority, and stop others for whoever does not fit."""
        del now_s
        if not self.waiting:
            return NO_DECISION
        starts: list[QueuedJob] = []
        stops: list[QueuedJob] = []
        unfit: set[object] = set()
        for job in sorted(
            self.waiting.values(), key=lambda one: (-one.request.priority, one.index)
        ):
            key = (job.shape, job.request.priority)
            if key in unfit:
                continue
            if pool.allocate(job) or self._make_room(job, pool, stops):
                starts.append(job)
                self.running[job.index] = self.waiting.pop(job.index)
            elif not self.skip:
                break
            else:
                unfit.add(key)
        # Nodes may have been freed of more than was needed: some go on elsewhere.
        moved = [job for job in stops if pool.allocate(job)]
        for job in stops:
            (self.waiting if job.placement is None else self.running)[job.index] = job
        return QueueDecision(starts, [job for job in stops if job.placement is None], moved)

    def _make_room(self, job: QueuedJob, pool: GpuPool, stops: list[QueuedJob]) -> bool:
        """Stop the least important, and of those the latest, until the job fits; else nobody."""
        victims = self._victims(job)
        if job.gpus > pool.free + sum(one.allocated_gpus for one in victims):
            return False
        places = []
        for victim in victims:
            places.append((victim, victim.placement, victim.allocated_gpus))
            pool.release(victim)
            if job.gpus <= pool.free and pool.allocate(job):
                break
        else:
            _put_back(places, pool)
            return False
        # Some may have been stopped for nothing: those of most importance go back first.
        for victim, place, held in reversed(places):
            if not _stays(victim, place, held, pool):
                stops.append(victim)
                del self.running[victim.index]
        return True

    def _victims(self, job: QueuedJob) -> list[QueuedJob]:
        least = job.request.priority - self.gap
        lower = [one for one in self.running.values() if one.request.priority < least]
        return sorted(lower, key=lambda one: (one.request.priority, -one.start_s, -one.index))


def _put_back(places: Iterable[tuple[QueuedJob, object, float]], pool: GpuPool) -> None:
    for victim, place, held in places:
        victim.placement, victim.allocated_gpus = place, held
        pool.reallocate(victim)


def _stays(victim: QueuedJob, place: object, held: float, pool: GpuPool) -> bool:
    """Give a job its old place back if all of it is still free."""
    if held > pool.free or not pool.allocate(victim):
        return False
    if victim.placement == place:
        return True
    pool.release(victim)
    return False
