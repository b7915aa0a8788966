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
from meshwright.run.posttrain.data.completion_spans import (
    CompletionSpans,
    TrainOn,
    find_completion_spans,
)
from meshwright.run.posttrain.data.record_format import ChatExample, TextExample
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer


class TokenizedExample(NamedTuple):
    """Tokens that are read together, and nothing else with them."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """Whether the model is to learn to write each, given those before."""
    unterminated_completions: int = 0
    """Answers without a token that ends them: the model does not learn to stop from these."""
    is_split_at_boundary: bool = False
    """Whether a token would have reached across the beginning or end of an answer."""

    @property
    def num_targets(self) -> int:
        """Tokens that are trained; the first has nothing before it and never is."""
        return int(self.loss_mask[1:].sum())


class TokenizedParts(NamedTuple):
    """A text in parts, as tokens."""

    parts: tuple[tuple[int, ...], ...]
    is_split_at_boundary: bool


def encode_parts(
    tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = False
) -> TokenizedParts:
    """Return the tokens of parts of one text so that none has a token reaching into the next.

    Every beginning made of whole parts has the tokens that it has alone. `special` adds what
    prompts begin with.
    """
    whole = tokenizer.encode("".join(texts), special=special)
    ends = []
    for count in range(1, len(texts)):
        beginning = tokenizer.encode("".join(texts[:count]), special=special)
        if whole[: len(beginning)] != beginning:
            break
        ends.append(len(beginning))
    else:
        cuts = [0, *ends, len(whole)]
        return TokenizedParts(
            tuple(tuple(whole[one:other]) for one, other in pairwise(cuts)), False
        )
    parts = [
        tuple(tokenizer.encode(text, special=special and not number))
        for number, text in enumerate(texts)
    ]
    joined = [token for part in parts for token in part]
    if tokenizer.decode(joined, skip_special=False) != tokenizer.decode(whole, skip_special=False):
        what = "its tokenizer reads an answer differently alone than behind its prompt"
        fix = "begin answers so that no token reaches into the prompt, or leave the chat out"
        raise InputError([Problem("tokenizer", what, fix)])
    return TokenizedParts(tuple(parts), True)


def encode_chat(
    tokenizer: Tokenizer,
    chat: ChatExample,
    train_on: TrainOn = "assistant",
    values: Mapping[str, Any] | None = None,
) -> list[TokenizedExample]:
    """Return a chat as tokens; several examples where each answer is one, none without answers.

    `values` are names that the template may ask for; the chat's own come before them.
    """
    given = chat._replace(template_kwargs={**(values or {}), **chat.template_kwargs})
    return [_encoded(tokenizer, one) for one in find_completion_spans(tokenizer, given, train_on)]


def _encoded(tokenizer: Tokenizer, one: CompletionSpans) -> TokenizedExample:
    cuts = sorted({0, *(edge for span in one.spans for edge in span), len(one.text)})
    begins = {begin for begin, _ in one.spans}
    found = encode_parts(tokenizer, [one.text[a:b] for a, b in pairwise(cuts)])
    tokens: list[int] = []
    trained: list[bool] = []
    open_ends = 0
    for first, part in zip(cuts, found.parts, strict=False):
        learnt = 0
        if first in begins:
            ends = [place for place, token in enumerate(part) if token in tokenizer.eos_token_ids]
            open_ends += not ends
            # Templates that mark answers say themselves where they end.
            learnt = len(part) if one.exact or not ends else ends[-1] + 1
        tokens += part
        trained += [place < learnt for place in range(len(part))]
    return TokenizedExample(
        np.array(tokens, np.int32), np.array(trained, bool), open_ends, found.is_split_at_boundary
    )


def encode_text(
    tokenizer: Tokenizer, text: TextExample, train_on: TrainOn = "assistant"
) -> TokenizedExample:
    """Return a prompt with its continuation and the token that ends it, as `LLM` reads prompts."""
    end = find_end_token(tokenizer)
    found = encode_parts(tokenizer, [text.prompt, text.completion], special=True)
    prompt, completion = found.parts
    if completion[-1:] != (end,):
        completion = (*completion, end)
    tokens = np.array([*prompt, *completion], np.int32)
    trained = np.arange(len(tokens)) >= (0 if train_on == "all" else len(prompt))
    return TokenizedExample(tokens, trained, 0, found.is_split_at_boundary)


def find_end_token(tokenizer: Tokenizer) -> int:
    """Return the token that ends an answer without a template."""
    named = tokenizer.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    if named is not None:
        return named
    if not tokenizer.eos_token_ids:
        what = "names no token that ends an answer"
        fix = "set eos_token in tokenizer_config.json"
        raise InputError([Problem("tokenizer", what, fix)])
    return min(tokenizer.eos_token_ids)
