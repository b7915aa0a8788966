"""An environment that says something to each turn, and takes its time."""

import time

from meshwright.run.posttrain.rollouts import Reply, Turn
from meshwright.run.posttrain.rollouts.record import RewardPart


class _Talk:
    def __init__(self, prompt: int) -> None:
        self.prompt, self._turns = (1, 2 + prompt % 8, 3), 0

    def step(self, turn: Turn, /) -> Reply:
        time.sleep(0.001)
        self._turns += 1
        even = sum(token % 2 == 0 for token in turn.tokens) / len(turn.tokens)
        part = RewardPart(name="even", value=even)
        if self._turns == 3:
            return Reply(done=True, rewards=(part,))
        return Reply(observation=(9, 9), rewards=(part,))


class _Talks:
    name, waits, verifiers, max_tokens = "talk", True, (), 5

    def reset(self, prompt: int, /) -> _Talk:
        return _Talk(prompt)


def talk(*, part: str) -> _Talks:
    """Talk in three turns; even tokens are rewarded."""
    del part
    return _Talks()
