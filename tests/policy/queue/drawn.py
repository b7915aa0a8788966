"""Jobs drawn at random, and a policy under watch: what every queue has to keep to."""

import random
from collections import Counter
from collections.abc import Sequence

from meshwright.policy.queue import Ask, Counted, Moves, Nodes, Policy, Pool, Standing

TEAMS = ("red", "green", "blue")


def drawn(
    seed: int, count: int = 120, *, most: int = 16, elastic: bool = False
) -> tuple[list[Ask], list[float]]:
    """Return jobs with whole seconds, and how long they run; estimates are right."""
    draw = random.Random(seed)
    asks, run_s, now_s = [], [], 0.0
    for at in range(count):
        now_s += draw.choice((0, 0, 1, 5, 20, 60))
        lasts_s = float(draw.choice((1, 5, 30, 100, 400)) + draw.randrange(20))
        gpus = float(min(most, draw.choice((1, 1, 1, 2, 2, 3, 4, 8, 11, 16))))
        asks.append(
            Ask(
                job=str(at), submit_s=now_s, gpus=gpus, estimate_s=lasts_s,
                team=draw.choice(TEAMS), user=f"user{draw.randrange(6)}",
                priority=float(draw.randrange(3)),
                least_gpus=max(1.0, gpus // 2) if elastic else None,
                most_gpus=min(float(most), gpus * 2) if elastic else None,
                serial_share=0.05 if elastic else 0.0,
            )
        )  # fmt: skip
        run_s.append(lasts_s)
    return asks, run_s


class Watched:
    """A policy that fails as soon as it gives a GPU twice, or a gang less than all it needs."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.live = policy, policy.live
        self.running: dict[int, Standing] = {}
        self.decisions = 0

    def __len__(self) -> int:
        return len(self.policy)

    def arrives(self, job: Standing, now_s: float) -> None:
        assert job.place is None
        self.policy.arrives(job, now_s)

    def ends(self, job: Standing, now_s: float) -> None:
        del self.running[job.index]
        self.policy.ends(job, now_s)

    def decide(self, now_s: float, pool: Pool) -> Moves:
        moves = self.policy.decide(now_s, pool)
        assert len({id(job) for part in moves[:3] for job in part}) == sum(map(len, moves[:3]))
        for job in moves.stops:
            assert job.place is None
            del self.running[job.index]
        for job in moves.starts:
            assert job.index not in self.running
            self.running[job.index] = job
        assert all(job.index in self.running for job in moves.resized)
        self._check(pool)
        self.decisions += 1
        return moves

    def _check(self, pool: Pool) -> None:
        jobs: Sequence[Standing] = list(self.running.values())
        for job in jobs:
            least, most = job.ask.least_gpus or job.gpus, job.ask.most_gpus or job.gpus
            assert least <= job.held <= most
        assert 0 <= pool.free == pool.total - sum(job.held for job in jobs)
        if isinstance(pool, Counted):
            return
        assert isinstance(pool, Nodes)
        taken: Counter[int] = Counter()
        for job in jobs:
            assert sum(gpus for _, gpus in job.place) == job.held
            assert len({node for node, _ in job.place}) == len(job.place)
            taken.update(dict(job.place))
        for at, node in enumerate(pool.nodes):
            assert 0 <= pool.free_gpus[at] == node.gpus - taken[at]
