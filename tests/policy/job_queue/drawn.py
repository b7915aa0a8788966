"""Jobs drawn at random, and a policy under watch: what every queue has to keep to."""

import random
from collections import Counter
from collections.abc import Sequence

from meshwright.policy.job_queue import (
    CountedPool,
    GpuPool,
    JobRequest,
    NodePool,
    QueueDecision,
    QueuedJob,
    QueuePolicy,
)

TEAMS = ("red", "green", "blue")


def drawn(
    seed: int, count: int = 120, *, most: int = 16, elastic: bool = False
) -> tuple[list[JobRequest], list[float]]:
    """Return jobs with whole seconds, and how long they run; estimates are right."""
    draw = random.Random(seed)
    asks, run_s, now_s = [], [], 0.0
    for at in range(count):
        now_s += draw.choice((0, 0, 1, 5, 20, 60))
        lasts_s = float(draw.choice((1, 5, 30, 100, 400)) + draw.randrange(20))
        gpus = float(min(most, draw.choice((1, 1, 1, 2, 2, 3, 4, 8, 11, 16))))
        asks.append(
            JobRequest(
                job_id=str(at), submit_s=now_s, gpus=gpus, estimate_s=lasts_s,
                team=draw.choice(TEAMS), user=f"user{draw.randrange(6)}",
                priority=float(draw.randrange(3)),
                min_gpus=max(1.0, gpus // 2) if elastic else None,
                max_gpus=min(float(most), gpus * 2) if elastic else None,
                serial_fraction=0.05 if elastic else 0.0,
            )
        )  # fmt: skip
        run_s.append(lasts_s)
    return asks, run_s


class Watched:
    """A policy that fails as soon as it gives a GPU twice, or a gang less than all it needs."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy, self.needs_job_progress = policy, policy.needs_job_progress
        self.running: dict[int, QueuedJob] = {}
        self.decisions = 0

    def __len__(self) -> int:
        return len(self.policy)

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        assert job.placement is None
        self.policy.on_submit(job, now_s)

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        del self.running[job.index]
        self.policy.on_end(job, now_s)

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        moves = self.policy.decide(now_s, pool)
        assert len({id(job) for part in moves[:3] for job in part}) == sum(map(len, moves[:3]))
        for job in moves.preemptions:
            assert job.placement is None
            del self.running[job.index]
        for job in moves.starts:
            assert job.index not in self.running
            self.running[job.index] = job
        assert all(job.index in self.running for job in moves.resizes)
        self._check(pool)
        self.decisions += 1
        return moves

    def _check(self, pool: GpuPool) -> None:
        jobs: Sequence[QueuedJob] = list(self.running.values())
        for job in jobs:
            least, most = job.request.min_gpus or job.gpus, job.request.max_gpus or job.gpus
            assert least <= job.allocated_gpus <= most
        assert 0 <= pool.free == pool.total - sum(job.allocated_gpus for job in jobs)
        if isinstance(pool, CountedPool):
            return
        assert isinstance(pool, NodePool)
        taken: Counter[int] = Counter()
        for job in jobs:
            assert sum(gpus for _, gpus in job.placement) == job.allocated_gpus
            assert len({node for node, _ in job.placement}) == len(job.placement)
            taken.update(dict(job.placement))
        for at, node in enumerate(pool.nodes):
            assert 0 <= pool.free_gpus[at] == node.gpus - taken[at]
