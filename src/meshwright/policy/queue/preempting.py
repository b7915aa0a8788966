"""Priorities with preemption: a job may stop others of lower priority, no more than it needs."""

from collections.abc import Iterable

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.moves import NO_MOVES, Moves
from meshwright.policy.queue.pool import Pool


class Preempting:
    """Highest priority first; ties by arrival. Whoever fits may pass those who do not."""

    live = True

    def __init__(self, *, gap: float = 0.0, skip: bool = True) -> None:
        """Stop only jobs whose priority is lower by more than `gap`; with `skip`, scan on."""
        self.gap, self.skip = gap, skip
        self.waiting: dict[int, Standing] = {}
        self.running: dict[int, Standing] = {}

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return len(self.waiting)

    def arrives(self, job: Standing, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        self.waiting[job.index] = job

    def ends(self, job: Standing, now_s: float) -> None:
        """Forget a job that ran."""
        del now_s
        del self.running[job.index]

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Start by priority, and stop others for whoever does not fit."""
        del now_s
        if not self.waiting:
            return NO_MOVES
        starts: list[Standing] = []
        stops: list[Standing] = []
        unfit: set[object] = set()
        for job in sorted(self.waiting.values(), key=lambda one: (-one.ask.priority, one.index)):
            key = (job.shape, job.ask.priority)
            if key in unfit:
                continue
            if pool.take(job) or self._make_room(job, pool, stops):
                starts.append(job)
                self.running[job.index] = self.waiting.pop(job.index)
            elif not self.skip:
                break
            else:
                unfit.add(key)
        # Nodes may have been freed of more than was needed: some go on elsewhere.
        moved = [job for job in stops if pool.take(job)]
        for job in stops:
            (self.waiting if job.place is None else self.running)[job.index] = job
        return Moves(starts, [job for job in stops if job.place is None], moved)

    def _make_room(self, job: Standing, pool: Pool, stops: list[Standing]) -> bool:
        """Stop the least important, and of those the latest, until the job fits; else nobody."""
        victims = self._victims(job)
        if job.gpus > pool.free + sum(one.held for one in victims):
            return False
        places = []
        for victim in victims:
            places.append((victim, victim.place, victim.held))
            pool.give(victim)
            if job.gpus <= pool.free and pool.take(job):
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

    def _victims(self, job: Standing) -> list[Standing]:
        least = job.ask.priority - self.gap
        lower = [one for one in self.running.values() if one.ask.priority < least]
        return sorted(lower, key=lambda one: (one.ask.priority, -one.began_s, -one.index))


def _put_back(places: Iterable[tuple[Standing, object, float]], pool: Pool) -> None:
    for victim, place, held in places:
        victim.place, victim.held = place, held
        pool.again(victim)


def _stays(victim: Standing, place: object, held: float, pool: Pool) -> bool:
    """Give a job its old place back if all of it is still free."""
    if held > pool.free or not pool.take(victim):
        return False
    if victim.place == place:
        return True
    pool.give(victim)
    return False
