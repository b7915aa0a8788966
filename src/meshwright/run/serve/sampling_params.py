"""`SamplingParams` and `StructuredOutputsParams`: how the tokens of a completion are sampled."""

from typing import Literal

import msgspec

from meshwright.spec.field_checks import check_integer, check_number, raise_problems

StructuredOutputsKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must look like."""

    kind: StructuredOutputsKind
    text: str = ""
    """The JSON schema, the regular expression, the EBNF grammar, or the choices as a JSON list."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen, and when an answer ends."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 leaves all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """The same seed and prompt draw the same tokens, whatever runs beside them."""
    logprobs: int | None = None
    """How many of the likeliest tokens to tell beside each one; 0 tells the token's own alone."""
    max_tokens: int | None = None
    """None goes on until the model's context is full."""
    min_tokens: int = 0
    """No end of text and no stop before so many."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; they are no part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    """Answers to the same prompt."""
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        raise_problems(
            check_number("temperature", self.temperature, 0, 100),
            check_number("top_p", self.top_p, 1e-9, 1),
            check_integer("top_k", self.top_k, least=0),
            check_number("min_p", self.min_p, 0, 1),
            check_number("repetition_penalty", self.repetition_penalty, 1e-3, 100),
            check_number("presence_penalty", self.presence_penalty, -2, 2),
            check_number("frequency_penalty", self.frequency_penalty, -2, 2),
            check_integer("n", self.n, most=128),
            check_integer("min_tokens", self.min_tokens, least=0),
            [] if self.max_tokens is None else check_integer("max_tokens", self.max_tokens),
            []
            if self.logprobs is None
            else check_integer("logprobs", self.logprobs, least=0, most=20),
        )


GREEDY = SamplingParams(temperature=0.0)
