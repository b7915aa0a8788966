"""Questions as tokens: exactly what serving would read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.encoding import encode_parts
from meshwright.run.posttrain.evaluate.questions import Prompt
from meshwright.run.serve.model.words import Words


class Continued(NamedTuple):
    """The tokens of a prompt, and those of one way to go on."""

    prompt: tuple[int, ...]
    more: tuple[int, ...]


def text_of(words: Words, prompt: Prompt, values: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a prompt as text, and whether its special tokens are still to be added."""
    if isinstance(prompt, str):
        return prompt, True
    return words.chat(prompt, **{**values, "add_generation_prompt": True}), False


def tokens_of(words: Words, prompt: Prompt, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a prompt as tokens."""
    text, special = text_of(words, prompt, values)
    return tuple(words.encode(text, special=special))


def continued(
    words: Words, prompt: Prompt, more: str, values: Mapping[str, Any], where: str
) -> Continued:
    """Return a prompt that goes on; no token reaches from the one into the other."""
    text, special = text_of(words, prompt, values)
    before, after = encode_parts(words, [text, more], special=special).parts
    if not before or not after:
        what = "has a prompt or a choice without tokens, so nothing is likely or unlikely"
        raise InputError([Problem(where, what, "begin the prompt with some text")])
    return Continued(before, after)
