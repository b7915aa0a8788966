"""Jobs that grow and shrink: GPUs go where the next one is worth most.

In the manner of Pollux (Qiao et al., OSDI 2021): every job that can run gets the least it runs on,
then GPUs go one by one to the job whose speed grows most by it, as a share of what it is. How speed
grows with GPUs is Amdahl's law with each job's serial share; batch sizes stay as they are.
"""

import heapq
import math

from meshwright.policy.job_queue.job import QueuedJob, speedup
from meshwright.policy.job_queue.policy import NO_DECISION, QueueDecision
from meshwright.policy.job_queue.pool.pool import GpuPool


class ElasticPolicy:
    """Sizes chosen anew each round; jobs that cannot change keep the size they asked for."""

    needs_job_progress = True

    def __init__(
        self,
        *,
        round_s: float = 60.0,
        min_speedup_gain: float = 0.1,
        resize_cooldown_s: float = 600.0,
    ) -> None:
        """Choose every `round_s`.

        Every change of size restarts a job. So jobs grow only where it raises their speed by the
        share `min_speedup_gain`, no sooner than `resize_cooldown_s` after they last started, and
        shrink only for others that wait.
        """
        self.round_s, self.min_speedup_gain, self.resize_cooldown_s = (
            round_s,
            min_speedup_gain,
            resize_cooldown_s,
        )
        self.jobs: dict[int, QueuedJob] = {}

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return sum(job.placement is None for job in self.jobs.values())

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        self.jobs[job.index] = job

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Forget a job."""
        del now_s
        del self.jobs[job.index]

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Choose who runs and on how many."""
        if not self.jobs:
            return NO_DECISION
        sizes = self.choose_sizes(pool.total)
        stops, shrinks, grows = [], [], []
        for job in self.jobs.values():
            size = sizes.get(job.index, 0.0)
            if job.placement is None or size == job.allocated_gpus:
                continue
            if size == 0:
                stops.append(job)
            elif size < job.allocated_gpus:
                shrinks.append(job)
            elif now_s - job.start_s >= self.resize_cooldown_s and (
                speedup(job.request, size)
                >= (1 + self.min_speedup_gain) * speedup(job.request, job.allocated_gpus)
            ):
                grows.append(job)
        waiting = [
            job for job in self.jobs.values() if job.placement is None and job.index in sizes
        ]
        for job in stops:
            pool.release(job)
        needed = sum(sizes[job.index] for job in waiting)
        resized = []
        for job in sorted(shrinks, key=lambda one: sizes[one.index] - one.allocated_gpus):
            if pool.free >= needed:
                break
            if _resize(job, sizes[job.index], pool):
                resized.append(job)
        starts = [job for job in waiting if pool.allocate(job, sizes[job.index])]
        resized += [job for job in grows if _resize(job, sizes[job.index], pool)]
        return QueueDecision(starts, stops, resized, now_s + self.round_s)

    def choose_sizes(self, total: float) -> dict[int, float]:
        """Return how many GPUs each job should have, by its index."""
        left = total
        found: dict[int, float] = {}
        # Who runs already goes first: stopping a job to start its like gains nothing.
        order = sorted(self.jobs.values(), key=lambda one: (one.placement is None, one.index))
        for job in order:
            least = job.request.min_gpus or job.gpus
            if least <= left:
                found[job.index] = least
                left -= least
        gains = []
        for index, size in found.items():
            gain = _gain(self.jobs[index], size)
            if gain is not None:
                gains.append((-gain, index))
        heapq.heapify(gains)
        while left >= 1 and gains:
            _, index = heapq.heappop(gains)
            found[index] += 1
            left -= 1
            gain = _gain(self.jobs[index], found[index])
            if gain is not None:
                heapq.heappush(gains, (-gain, index))
        return found


def _gain(job: QueuedJob, size: float) -> float | None:
    """Return what one GPU more is worth to a job, None where it cannot use it.

    As the logarithm of its speed: the sum of these is largest where no job starves for others.
    """
    ask = job.request
    if size + 1 > (ask.max_gpus or ask.gpus):
        return None
    return math.log(speedup(ask, size + 1) / speedup(ask, size))


def _resize(job: QueuedJob, size: float, pool: GpuPool) -> bool:
    """Change a job's size, or leave it as it is."""
    place, held = job.placement, job.allocated_gpus
    pool.release(job)
    if pool.allocate(job, size):
        return True
    job.placement, job.allocated_gpus = place, held
    pool.reallocate(job)
    return False
