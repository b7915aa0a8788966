"""`PromptEnvironment`: a single-turn environment: a prompt from a file, and checks of the answer.

Which prompt a number has follows from the seed and the number alone. So a run goes on at the place
where it ended, and every pass through the prompts asks each of them once.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.run.posttrain.evaluation.code_execution import extract_code
from meshwright.run.posttrain.evaluation.final_answer import strip_reasoning
from meshwright.run.posttrain.evaluation.questions import (
    CodeQuestion,
    ExactMatchQuestion,
    MultipleChoiceQuestion,
)
from meshwright.run.posttrain.prompt_task.prompt_files import TaskPrompt
from meshwright.run.posttrain.prompt_task.reward_config import (
    ExactReward,
    FormatReward,
    ModelReward,
    NumberReward,
    RewardConfig,
)
from meshwright.run.posttrain.rollout.environment import DatasetPart, EnvironmentStep
from meshwright.run.posttrain.rollout.rollout import RolloutTurn
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierJob
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer

_TEXT = "meshwright.run.posttrain.evaluation.verifiers.text_verifiers"
EXACT, NUMBER = f"{_TEXT}:verify_exact", f"{_TEXT}:verify_number"
CHOICE, FORM = f"{_TEXT}:verify_choice", f"{_TEXT}:verify_format"
CODE_VERIFIER = "meshwright.run.posttrain.evaluation.verifiers.code_verifier:passes_tests"


def make_reward_model_key(reward: ModelReward) -> str:
    """Return what a reward model is called among those who judge."""
    return f"reward model {reward.name}"


class TokenRenderer:
    """Tokens as the text that people read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._words = tokenizer

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._words.decode(tokens, skip_special=False)


class PromptEnvironment:
    """Prompts of files, in an order of its own for each pass."""

    def __init__(
        self,
        prompts: Sequence[TaskPrompt],
        rewards: Sequence[RewardConfig],
        tokenizer: Tokenizer,
        *,
        digest: str,
        part: DatasetPart = "train",
        seed: int | None = None,
    ) -> None:
        """Ask these prompts in their order, or by a seed in another one each time."""
        self._asked, self._rewards, self._seed = tuple(prompts), tuple(rewards), seed
        self._read, self.words = tokenizer, TokenRenderer(tokenizer)
        # Runs that go on, or replay, must have the same prompts; where files lie does not matter.
        self.name = f"questions {digest} ({part})"
        self.may_block = False
        self.verifiers = tuple(dict.fromkeys(self._named()))
        self._order = lru_cache(maxsize=4)(self._drawn)

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def runs_programs(self) -> bool:
        """Whether verifiers run what a model wrote."""
        return CODE_VERIFIER in self.verifiers

    def prompt_at(self, prompt: int) -> TaskPrompt:
        """Return what is asked under a number."""
        passes, place = divmod(prompt, len(self._asked))
        return self._asked[place if self._seed is None else self._order(passes)[place]]

    def reset(self, prompt: int, /) -> "_Episode":
        """Begin with the prompt of a number."""
        return _Episode(self, prompt)

    def verifier_jobs(self, prompt: int, turn: RolloutTurn) -> Iterator[VerifierJob]:
        """Return what an answer to the prompt of a number is judged by."""
        asked = self.prompt_at(prompt)
        text = self._read.decode(turn.tokens)
        for reward in self._rewards:
            if isinstance(reward, ModelReward):
                ended = turn.tokens[-1:] and turn.tokens[-1] in self._read.eos_token_ids
                tokens = [*asked.token_ids, *turn.tokens, *(asked.template_suffix if ended else ())]
                name, weight, who = reward.name, reward.weight, make_reward_model_key(reward)
                yield VerifierJob(
                    name=name, verifier=who, payload={"tokens": tokens}, weight=weight
                )
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

    def __init__(self, environment: PromptEnvironment, number: int) -> None:
        self._environment, self._number = environment, number
        self.prompt = environment.prompt_at(number).token_ids

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:
        """End after the first answer, which is to be judged."""
        return EnvironmentStep(
            done=True, verifier_jobs=tuple(self._environment.verifier_jobs(self._number, turn))
        )


def _check(reward: RewardConfig, asked: TaskPrompt, text: str) -> VerifierJob:
    """Return the check of an answer's text by a verifier."""
    question, runs = asked.question, False
    job: dict[str, Any]
    if isinstance(reward, FormatReward):
        who, job = FORM, {"text": text, "pattern": reward.pattern}
    elif isinstance(question, MultipleChoiceQuestion):
        who, job = CHOICE, {"text": text, "choices": question.choices, "right": question.right}
    elif isinstance(question, CodeQuestion):
        program = extract_code(strip_reasoning(text), question.prefix)
        who, job, runs = CODE_VERIFIER, {"program": program, "tests": question.tests}, True
    else:
        assert isinstance(question, ExactMatchQuestion), (
            "prompts without an answer have no such reward"
        )
        who, job = NUMBER, {"text": text, "answers": question.answers}
        if isinstance(reward, ExactReward):
            who, job = (
                EXACT,
                job | {"pattern": reward.pattern, "normalization": reward.normalization},
            )
        elif isinstance(reward, NumberReward):
            job["require_marker"] = reward.require_marker
    return VerifierJob(
        name=reward.name, verifier=who, payload=job, weight=reward.weight, is_final=runs
    )
