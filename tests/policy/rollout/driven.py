"""A driver for tests: actions take as long as a generator of random numbers says."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

from meshwright.policy.rollout import Action, Arrangement, Controller, Drop, Ending, Generate, Wait

Judge = Callable[[Generate, Random], Ending]


class Driven:
    """What happened, in order."""

    def __init__(self, arrangement: Arrangement, seed: int, judge: Judge | None = None) -> None:
        self.rng, self.judge = Random(seed), judge
        self.controller = Controller(arrangement)
        self.begun: list[Action] = []
        self.log: list[tuple[str, Action]] = []
        self.waits: list[Wait] = []
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._tickets = 0
        self._stopped: set[Generate] = set()

    def go(self, most: int = 1_000_000) -> "Driven":
        """Carry actions out until all is done, or so many have ended."""
        self._begin()
        while not self.controller.is_done and most > 0:
            assert self._due, f"nothing runs, and nobody is done: {self.waits[-2:]}"
            self.now, _, action = heappop(self._due)
            if action in self._stopped:
                continue
            ending: Ending = "kept"
            if isinstance(action, Generate) and self.judge is not None:
                ending = self.judge(action, self.rng)
            assert not isinstance(action, Drop)
            self.log.append(("end", action))
            self.controller.end(action, ending)
            self._begin()
            most -= 1
        return self

    def _begin(self) -> None:
        for action in self.controller.begin():
            self.begun.append(action)
            self.log.append(("begin", action))
            if isinstance(action, Drop):
                self._stopped.add(Generate(action.group, action.attempt, action.version))
                continue
            self._tickets += 1
            # Now and then something takes far longer than everything else.
            lasts = self.rng.expovariate(1.0) * (20 if self.rng.random() < 0.1 else 1)
            heappush(self._due, (self.now + lasts, self._tickets, action))
        self.waits += self.controller.waits
