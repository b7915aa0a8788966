"""Text to tokens, each of which is trained or is not.

An answer begins where the tokens of its prompt end, because there serving begins to draw. Usually
the tokens of the whole text break there too. Where one would reach across (a newline of the
template and one of the answer, say), the text is encoded in parts, so that the prompt has the
tokens that it has when it is served. What a template writes after the end of a turn is never drawn,
so it is not trained either.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.answers import Spread, Train, spread
from meshwright.run.posttrain.data.forms import Chat, Text
from meshwright.run.serve.model.words import Words


class Example(NamedTuple):
    """Tokens that are read together, and nothing else with them."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    """Whether the model is to learn to write each, given those before."""
    open_ends: int = 0
    """Answers without a token that ends them: the model does not learn to stop from these."""
    parted: bool = False
    """Whether a token would have reached across the beginning or end of an answer."""

    @property
    def targets(self) -> int:
        """Tokens that are trained; the first has nothing before it and never is."""
        return int(self.trained[1:].sum())


class Parts(NamedTuple):
    """A text in parts, as tokens."""

    parts: tuple[tuple[int, ...], ...]
    parted: bool


def encode_parts(words: Words, texts: Sequence[str], *, special: bool = False) -> Parts:
    """Return the tokens of parts of one text so that none has a token reaching into the next.

    Every beginning made of whole parts has the tokens that it has alone. `special` adds what
    prompts begin with.
    """
    whole = words.encode("".join(texts), special=special)
    ends = []
    for count in range(1, len(texts)):
        beginning = words.encode("".join(texts[:count]), special=special)
        if whole[: len(beginning)] != beginning:
            break
        ends.append(len(beginning))
    else:
        cuts = [0, *ends, len(whole)]
        return Parts(tuple(tuple(whole[one:other]) for one, other in pairwise(cuts)), False)
    parts = [
        tuple(words.encode(text, special=special and not number))
        for number, text in enumerate(texts)
    ]
    joined = [token for part in parts for token in part]
    if words.decode(joined, skip_special=False) != words.decode(whole, skip_special=False):
        what = "its tokenizer reads an answer differently alone than behind its prompt"
        fix = "begin answers so that no token reaches into the prompt, or leave the chat out"
        raise InputError([Problem("tokenizer", what, fix)])
    return Parts(tuple(parts), True)


def encode_chat(
    words: Words, chat: Chat, train: Train = "answers", values: Mapping[str, Any] | None = None
) -> list[Example]:
    """Return a chat as tokens; several examples where each answer is one, none without answers.

    `values` are names that the template may ask for; the chat's own come before them.
    """
    given = chat._replace(values={**(values or {}), **chat.values})
    return [_encoded(words, one) for one in spread(words, given, train)]


def _encoded(words: Words, one: Spread) -> Example:
    cuts = sorted({0, *(edge for span in one.spans for edge in span), len(one.text)})
    begins = {begin for begin, _ in one.spans}
    found = encode_parts(words, [one.text[a:b] for a, b in pairwise(cuts)])
    tokens: list[int] = []
    trained: list[bool] = []
    open_ends = 0
    for first, part in zip(cuts, found.parts, strict=False):
        learnt = 0
        if first in begins:
            ends = [place for place, token in enumerate(part) if token in words.ends]
            open_ends += not ends
            # Templates that mark answers say themselves where they end.
            learnt = len(part) if one.exact or not ends else ends[-1] + 1
        tokens += part
        trained += [place < learnt for place in range(len(part))]
    return Example(np.array(tokens, np.int32), np.array(trained, bool), open_ends, found.parted)


def encode_text(words: Words, text: Text, train: Train = "answers") -> Example:
    """Return a prompt with its continuation and the token that ends it, as `LLM` reads prompts."""
    end = end_of(words)
    found = encode_parts(words, [text.prompt, text.completion], special=True)
    prompt, completion = found.parts
    if completion[-1:] != (end,):
        completion = (*completion, end)
    tokens = np.array([*prompt, *completion], np.int32)
    trained = np.arange(len(tokens)) >= (0 if train == "all" else len(prompt))
    return Example(tokens, trained, 0, found.parted)


def end_of(words: Words) -> int:
    """Return the token that ends an answer without a template."""
    named = words.number(words.special.get("eos_token", ""))
    if named is not None:
        return named
    if not words.ends:
        what = "names no token that ends an answer"
        fix = "set eos_token in tokenizer_config.json"
        raise InputError([Problem("tokenizer", what, fix)])
    return min(words.ends)
