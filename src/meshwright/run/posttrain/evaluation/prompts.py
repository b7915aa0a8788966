"""Questions as tokens: exactly what serving would read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.encoding import encode_parts
from meshwright.run.posttrain.evaluation.questions import Prompt
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer


class PromptContinuation(NamedTuple):
    """The tokens of a prompt, and those of one way to go on."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def render_prompt(
    tokenizer: Tokenizer, prompt: Prompt, values: Mapping[str, Any]
) -> tuple[str, bool]:
    """Return a prompt as text, and whether its special tokens are still to be added."""
    if isinstance(prompt, str):
        return prompt, True
    return tokenizer.apply_chat_template(prompt, **{**values, "add_generation_prompt": True}), False


def encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, values: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return a prompt as tokens."""
    text, special = render_prompt(tokenizer, prompt, values)
    return tuple(tokenizer.encode(text, special=special))


def encode_continuation(
    tokenizer: Tokenizer, prompt: Prompt, more: str, values: Mapping[str, Any], where: str
) -> PromptContinuation:
    """Return a prompt that goes on; no token reaches from the one into the other."""
    text, special = render_prompt(tokenizer, prompt, values)
    before, after = encode_parts(tokenizer, [text, more], special=special).parts
    if not before or not after:
        what = "has a prompt or a choice without tokens, so nothing is likely or unlikely"
        raise InputError([Problem(where, what, "begin the prompt with some text")])
    return PromptContinuation(before, after)
