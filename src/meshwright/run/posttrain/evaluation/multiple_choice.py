"""Multiple choice: which answer the model thinks likeliest, by three measures of likely.

The sum of the log-probabilities of a choice's tokens favours short ones; per token and per byte of
text they compare choices of different lengths (per byte does not depend on the tokenizer).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.run.posttrain.evaluation.prompts import PromptContinuation, encode_continuation
from meshwright.run.posttrain.evaluation.questions import MultipleChoiceQuestion
from meshwright.run.serve.llm import GenerationOutput
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer

_ONE = SamplingParams(temperature=0.0, max_tokens=1)
"""The engine draws at least one token; it is not read."""


class ChoiceLikelihood(NamedTuple):
    """How likely one choice is behind its prompt."""

    logprob: float
    num_tokens: int
    num_bytes: int


MEASURES: dict[str, Callable[[ChoiceLikelihood], float]] = {
    "sum": lambda one: one.logprob,
    "per_token": lambda one: one.logprob / one.num_tokens,
    "per_byte": lambda one: one.logprob / one.num_bytes,
}


def build_choice_requests(
    tokenizer: Tokenizer,
    question: MultipleChoiceQuestion,
    values: Mapping[str, Any],
    adapter: str | None = None,
) -> list[tuple[Request, PromptContinuation]]:
    """Return what to ask so as to learn how likely each choice is."""
    found = [
        encode_continuation(tokenizer, question.prompt, choice, values, question.where)
        for choice in question.choices
    ]
    return [
        (
            Request(
                prompt_token_ids=one.prompt + one.continuation,
                sampling_params=_ONE,
                prompt_logprobs=0,
                lora_name=adapter,
            ),
            one,
        )
        for one in found
    ]


def compute_choice_likelihood(
    completion: GenerationOutput, asked: PromptContinuation, choice: str
) -> ChoiceLikelihood:
    """Return how likely a choice was, from what the engine told of the prompt that it ended."""
    told = completion.prompt_logprobs[-len(asked.continuation) :]
    assert tuple(one.token_id for one in told) == asked.continuation
    total = sum(one.logprob for one in told)
    return ChoiceLikelihood(total, len(asked.continuation), len(choice.encode()))


def pick_choices(likelihoods: Sequence[ChoiceLikelihood]) -> dict[str, int]:
    """Return the likeliest choice by each measure; of equals the first."""
    return {
        name: max(range(len(likelihoods)), key=lambda one: measure(likelihoods[one]))
        for name, measure in MEASURES.items()
    }
