"""An environment that says something to each turn, and takes its time."""

import time

from meshwright.run.posttrain.rollout import EnvironmentStep, RolloutTurn
from meshwright.run.posttrain.rollout.reward_component import RewardComponent


class _Talk:
    def __init__(self, prompt: int) -> None:
        self.prompt, self._turns = (1, 2 + prompt % 8, 3), 0

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:
        time.sleep(0.001)
        self._turns += 1
        even = sum(token % 2 == 0 for token in turn.tokens) / len(turn.tokens)
        part = RewardComponent(name="even", value=even)
        if self._turns == 3:
            return EnvironmentStep(done=True, rewards=(part,))
        return EnvironmentStep(observation=(9, 9), rewards=(part,))


class _Talks:
    name, may_block, verifiers, max_tokens = "talk", True, (), 5

    def reset(self, prompt: int, /) -> _Talk:
        return _Talk(prompt)


def talk(*, part: str) -> _Talks:
    """Talk in three turns; even tokens are rewarded."""
    del part
    return _Talks()
