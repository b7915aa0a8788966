"""How long jobs will run, judged by earlier ones: of the same user and name, size, or at all.

Names that differ only in digits are alike (`train-17`, `train-18`). Recent runs count most. A job
is learned from only once it has ended, so that nothing is known before its time. In the manner of
the history that Helios' scheduler keeps (Hu et al., SC 2021), without its regression trees.
"""

import heapq
import math
import re
from collections.abc import Hashable, Iterator, Sequence

from meshwright.policy.job_queue.job import JobRequest

_DIGITS = re.compile(r"[0-9]+|[0-9a-f]{8,}")
_FADE = 0.7
_ENOUGH = 3.0
"""Runs after which what is alike more closely is trusted more than what is alike less."""


class DurationPredictor:
    """What earlier jobs took."""

    def __init__(self, first_s: float = 3600.0) -> None:
        """Begin with `first_s` for the very first job."""
        self.first_s = first_s
        self.seen: dict[Hashable, tuple[float, float]] = {}
        """Faded number of runs, and faded mean of the logarithm of what they took."""

    def predict(self, ask: JobRequest) -> float:
        """Return how long a job is expected to run, in seconds."""
        found = math.log(max(1.0, self.first_s))
        # From the most general to the closest; each is trusted by how often it was seen.
        for key in reversed(tuple(_likeness(ask))):
            if (seen := self.seen.get(key)) is not None:
                trust = seen[0] / (seen[0] + 1 / _ENOUGH)
                found += trust * (seen[1] - found)
        return math.exp(found)

    def update(self, ask: JobRequest, run_s: float) -> None:
        """Remember what a job took."""
        took = math.log(max(1.0, run_s))
        for key in _likeness(ask):
            count, mean = self.seen.get(key, (0.0, 0.0))
            count = count * _FADE + 1.0
            self.seen[key] = (count, mean + (took - mean) / count)


def _likeness(ask: JobRequest) -> Iterator[Hashable]:
    """Name what a job has in common with others, the closest first."""
    name = _DIGITS.sub("#", ask.name.lower())
    if name:
        yield "name", ask.user, ask.team, name, ask.gpus
        yield "name", ask.user, ask.team, name
    if ask.user:
        yield "user", ask.user, ask.gpus
        yield "user", ask.user
    yield "team", ask.team, ask.gpus
    yield "size", ask.gpus
    yield "all"


def predict_durations(asks: Sequence[JobRequest], run_s: Sequence[float]) -> list[float]:
    """Return what each job would have been expected to take when it was handed in.

    Jobs are taken to end as early as they can, as if none had waited.
    """
    known, found = DurationPredictor(), [0.0] * len(asks)
    under_way: list[tuple[float, int]] = []
    for at in sorted(range(len(asks)), key=lambda one: asks[one].submit_s):
        now_s = asks[at].submit_s
        while under_way and under_way[0][0] <= now_s:
            _, done = heapq.heappop(under_way)
            known.update(asks[done], run_s[done])
        found[at] = known.predict(asks[at])
        heapq.heappush(under_way, (now_s + run_s[at], at))
    return found
