"""A driver for tests: actions take as long as a generator of random numbers says."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

from meshwright.policy.rollout import (
    Action,
    DropAction,
    GenerateAction,
    GroupEnd,
    IdleReason,
    RolloutController,
    RolloutPolicy,
)

Judge = Callable[[GenerateAction, Random], GroupEnd]


class Driven:
    """What happened, in order."""

    def __init__(self, arrangement: RolloutPolicy, seed: int, judge: Judge | None = None) -> None:
        self.rng, self.judge = Random(seed), judge
        self.controller = RolloutController(arrangement)
        self.begun: list[Action] = []
        self.log: list[tuple[str, Action]] = []
        self.waits: list[IdleReason] = []
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._tickets = 0
        self._stopped: set[GenerateAction] = set()

    def go(self, most: int = 1_000_000) -> "Driven":
        """Carry actions out until all is done, or so many have ended."""
        self._begin()
        while not self.controller.is_done and most > 0:
            assert self._due, f"nothing runs, and nobody is done: {self.waits[-2:]}"
            self.now, _, action = heappop(self._due)
            if action in self._stopped:
                continue
            ending: GroupEnd = "kept"
            if isinstance(action, GenerateAction) and self.judge is not None:
                ending = self.judge(action, self.rng)
            assert not isinstance(action, DropAction)
            self.log.append(("end", action))
            self.controller.complete_action(action, ending)
            self._begin()
            most -= 1
        return self

    def _begin(self) -> None:
        for action in self.controller.start_actions():
            self.begun.append(action)
            self.log.append(("begin", action))
            if isinstance(action, DropAction):
                self._stopped.add(GenerateAction(action.group, action.attempt, action.version))
                continue
            self._tickets += 1
            # Now and then something takes far longer than everything else.
            lasts = self.rng.expovariate(1.0) * (20 if self.rng.random() < 0.1 else 1)
            heappush(self._due, (self.now + lasts, self._tickets, action))
        self.waits += self.controller.idle_reasons
