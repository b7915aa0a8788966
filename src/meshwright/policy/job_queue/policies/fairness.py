"""Shares of unlike GPUs: who has made least progress goes first.

`MaxMinFairnessPolicy` follows Gavel (Narayanan et al., OSDI 2020) in what it aims at, the most
even progress over kinds of GPU, but chooses round by round and not by a linear program.
"""

from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policies.preemptive_order import PreemptiveOrderPolicy
from meshwright.policy.job_queue.policy import QueueDecision
from meshwright.policy.job_queue.pool.node_pool import NodePool
from meshwright.policy.job_queue.pool.pool import GpuPool


class MaxMinFairnessPolicy(PreemptiveOrderPolicy):
    """Even progress over unlike GPUs: who has had least goes first, to the kind it gains most by.

    What a job has had is time × GPUs × its speed there, over the mean of its speeds on all kinds,
    so that a job that is slow everywhere is not owed more than others.
    """

    def __init__(self, *, round_s: float = 360.0) -> None:
        """Choose every `round_s`; Gavel's rounds last six minutes."""
        super().__init__(self._key, moving=True, round_s=round_s)

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Choose anew, kind by kind."""
        if not self.jobs or not isinstance(pool, NodePool) or len(pool.kinds) == 1:
            return super().decide(now_s, pool)
        before = {
            job.index: job.placement for job in self.jobs.values() if job.placement is not None
        }
        pool.release_all()
        kinds = pool.kinds
        jobs = self.jobs.values()
        usual = {
            kind: sum(job.request.speed_by_gpu_kind.get(kind, 1.0) for job in jobs) / len(jobs)
            for kind in kinds
        }
        starts, stops, moved = [], [], []
        for job in self.order_jobs(now_s):
            had = before.get(job.index)
            job.placement, job.allocated_gpus = None, 0.0
            if self._take(job, pool, usual):
                if had is None:
                    starts.append(job)
                elif had != job.placement:
                    moved.append(job)
            elif had is not None:
                stops.append(job)
        self.running += len(starts) - len(stops)
        return QueueDecision(starts, stops, moved, now_s + (self.round_s or 0.0))

    @staticmethod
    def _take(job: QueuedJob, pool: NodePool, usual: dict[str, float]) -> bool:
        """Try the kinds on which a job is fastest compared with others, one after another."""
        speeds = job.request.speed_by_gpu_kind
        allowed = [
            kind for kind in usual if not job.request.gpu_kinds or kind in job.request.gpu_kinds
        ]
        allowed.sort(key=lambda kind: -speeds.get(kind, 1.0) / usual[kind])
        return any(pool.allocate_kind(job, kind) for kind in allowed)

    @staticmethod
    def _key(job: QueuedJob) -> float:
        speeds = job.request.speed_by_gpu_kind
        mean = sum(speeds.values()) / len(speeds) if speeds else 1.0
        return job.progress_s / mean
