"""`Questions`: an environment of one turn: a prompt of a file, and checks of the answer to it.

Which prompt a number has follows from the seed and the number alone. So a run goes on at the place
where it ended, and every pass through the prompts asks each of them once.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from meshwright.run.posttrain.evaluate.code import program_of
from meshwright.run.posttrain.evaluate.final import spoken
from meshwright.run.posttrain.evaluate.questions import Choices, Code, Exact
from meshwright.run.posttrain.questions.reading import Asked
from meshwright.run.posttrain.questions.settings import (
    ExactReward,
    FormatReward,
    ModelReward,
    NumberReward,
    RewardSettings,
)
from meshwright.run.posttrain.rollouts.environment import Reply
from meshwright.run.posttrain.rollouts.record import Turn
from meshwright.run.posttrain.rollouts.verifiers.check import Check
from meshwright.run.serve.model.words import Words

Part = Literal["train", "held-out"]
_TEXT = "meshwright.run.posttrain.evaluate.judge_text"
EXACT, NUMBER, CHOICE, FORM = (f"{_TEXT}:{name}" for name in ("exact", "number", "choice", "form"))
CODE = "meshwright.run.posttrain.evaluate.judge_code:passes"


def judge_of(reward: ModelReward) -> str:
    """Return what a reward model is called among those who judge."""
    return f"reward model {reward.name}"


class Written:
    """Tokens as the text that people read."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._words.decode(tokens, skip_special=False)


class Questions:
    """Prompts of files, in an order of its own for each pass."""

    def __init__(
        self,
        asked: Sequence[Asked],
        rewards: Sequence[RewardSettings],
        words: Words,
        *,
        digest: str,
        part: Part = "train",
        seed: int | None = None,
    ) -> None:
        """Ask these prompts in their order, or by a seed in another one each time."""
        self._asked, self._rewards, self._seed = tuple(asked), tuple(rewards), seed
        self._read, self.words = words, Written(words)
        # Runs that go on, or replay, must have the same prompts; where files lie does not matter.
        self.name = f"questions {digest} ({part})"
        self.waits = False
        self.verifiers = tuple(dict.fromkeys(self._named()))
        self._order = lru_cache(maxsize=4)(self._drawn)

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def runs_programs(self) -> bool:
        """Whether verifiers run what a model wrote."""
        return CODE in self.verifiers

    def asked(self, prompt: int) -> Asked:
        """Return what is asked under a number."""
        passes, place = divmod(prompt, len(self._asked))
        return self._asked[place if self._seed is None else self._order(passes)[place]]

    def reset(self, prompt: int, /) -> "_Episode":
        """Begin with the prompt of a number."""
        return _Episode(self, prompt)

    def checks_of(self, prompt: int, turn: Turn) -> Iterator[Check]:
        """Return what an answer to the prompt of a number is judged by."""
        asked = self.asked(prompt)
        text = self._read.decode(turn.tokens)
        for reward in self._rewards:
            if isinstance(reward, ModelReward):
                ended = turn.tokens[-1:] and turn.tokens[-1] in self._read.ends
                tokens = [*asked.tokens, *turn.tokens, *(asked.tail if ended else ())]
                name, weight, who = reward.name, reward.weight, judge_of(reward)
                yield Check(name=name, verifier=who, job={"tokens": tokens}, weight=weight)
            else:
                yield _check(reward, asked, text)

    def _named(self) -> Iterator[str]:
        """Go through the verifiers of all prompts."""
        kinds = {type(asked.question): asked for asked in self._asked}
        for asked in kinds.values():
            for reward in self._rewards:
                if not isinstance(reward, ModelReward):
                    yield _check(reward, asked, "").verifier

    def _drawn(self, passes: int) -> list[int]:
        chance = np.random.default_rng((self._seed or 0, passes))
        order: list[int] = chance.permutation(len(self._asked)).tolist()
        return order


class _Episode:
    """One prompt."""

    def __init__(self, environment: Questions, number: int) -> None:
        self._environment, self._number = environment, number
        self.prompt = environment.asked(number).tokens

    def step(self, turn: Turn, /) -> Reply:
        """End after the first answer, which is to be judged."""
        return Reply(done=True, checks=tuple(self._environment.checks_of(self._number, turn)))


def _check(reward: RewardSettings, asked: Asked, text: str) -> Check:
    """Return the check of an answer's text by a verifier."""
    question, runs = asked.question, False
    job: dict[str, Any]
    if isinstance(reward, FormatReward):
        who, job = FORM, {"text": text, "pattern": reward.pattern}
    elif isinstance(question, Choices):
        who, job = CHOICE, {"text": text, "choices": question.choices, "right": question.right}
    elif isinstance(question, Code):
        program = program_of(spoken(text), question.prefix)
        who, job, runs = CODE, {"program": program, "tests": question.tests}, True
    else:
        assert isinstance(question, Exact), "prompts without an answer have no such reward"
        who, job = NUMBER, {"text": text, "answers": question.answers}
        if isinstance(reward, ExactReward):
            who, job = EXACT, job | {"pattern": reward.pattern, "normal": reward.normal}
        elif isinstance(reward, NumberReward):
            job["marked"] = reward.marked
    return Check(name=reward.name, verifier=who, job=job, weight=reward.weight, stands=runs)
