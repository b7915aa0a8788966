"""Multiple choice: which answer the model thinks likeliest, by three measures of likely.

The sum of the log-probabilities of a choice's tokens favours short ones; per token and per byte of
text they compare choices of different lengths (per byte does not depend on the tokenizer).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.run.posttrain.evaluate.prompts import Continued, continued
from meshwright.run.posttrain.evaluate.questions import Choices
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.llm import Completion
from meshwright.run.serve.model.words import Words

_ONE = Sampling(temperature=0.0, max_tokens=1)
"""The engine draws at least one token; it is not read."""


class Likelihood(NamedTuple):
    """How likely one choice is behind its prompt."""

    logprob: float
    tokens: int
    bytes: int


MEASURES: dict[str, Callable[[Likelihood], float]] = {
    "sum": lambda one: one.logprob,
    "per_token": lambda one: one.logprob / one.tokens,
    "per_byte": lambda one: one.logprob / one.bytes,
}


def asks_of(
    words: Words, question: Choices, values: Mapping[str, Any], adapter: str | None = None
) -> list[tuple[Ask, Continued]]:
    """Return what to ask so as to learn how likely each choice is."""
    found = [
        continued(words, question.prompt, choice, values, question.where)
        for choice in question.choices
    ]
    return [
        (
            Ask(prompt=one.prompt + one.more, sampling=_ONE, prompt_logprobs=0, adapter=adapter),
            one,
        )
        for one in found
    ]


def likelihood(completion: Completion, asked: Continued, choice: str) -> Likelihood:
    """Return how likely a choice was, from what the engine told of the prompt that it ended."""
    told = completion.prompt_logprobs[-len(asked.more) :]
    assert tuple(one.token for one in told) == asked.more
    total = sum(one.logprob for one in told)
    return Likelihood(total, len(asked.more), len(choice.encode()))


def chosen(likelihoods: Sequence[Likelihood]) -> dict[str, int]:
    """Return the likeliest choice by each measure; of equals the first."""
    return {
        name: max(range(len(likelihoods)), key=lambda one: measure(likelihoods[one]))
        for name, measure in MEASURES.items()
    }
