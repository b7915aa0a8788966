"""How likely tokens were, as completions and as chats tell it."""

from collections.abc import Iterable, Sequence

from meshwright.run.serve.asked import TokenLogprob
from meshwright.run.serve.server.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    LikelyToken,
)
from meshwright.run.serve.server.words import Words

LEAST = -9999.0
"""What is told of a token that could not come: JSON has no minus infinity."""


def chat_logprobs(tokens: Iterable[TokenLogprob], words: Words) -> ChatLogprobs:
    """Return them as chats tell them."""
    content = []
    for told in tokens:
        text = words.decode([told.token])
        top = [_likely(token, logprob, words) for token, logprob in told.top]
        content.append(ChatLogprob(text, finite(told.logprob), list(text.encode()), top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokens: Sequence[TokenLogprob], words: Words, *, offset: int, most: int
) -> CompletionLogprobs:
    """Return them as completions tell them.

    Args:
        tokens: What the engine said.
        words: The texts of tokens.
        offset: Characters of the answer before the first of them.
        most: How many of the likeliest were asked for.
    """
    texts = [words.decode([told.token]) for told in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top: list[dict[str, float] | None] = [
        {words.decode([token]): finite(logprob) for token, logprob in told.top[:most]}
        if most
        else None
        for told in tokens
    ]
    return CompletionLogprobs(texts, [finite(told.logprob) for told in tokens], top, offsets)


def joined(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    """Return several as one."""
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.tokens.extend(part.tokens)
        whole.token_logprobs.extend(part.token_logprobs)
        whole.top_logprobs.extend(part.top_logprobs)
        whole.text_offset.extend(part.text_offset)
    return whole


def finite(logprob: float) -> float:
    """Return a logprob that JSON can hold."""
    return max(logprob, LEAST)


def _likely(token: int, logprob: float, words: Words) -> LikelyToken:
    text = words.decode([token])
    return LikelyToken(text, finite(logprob), list(text.encode()))
