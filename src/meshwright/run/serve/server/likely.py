"""How likely tokens were, as completions and as chats tell it."""

from codecs import getincrementaldecoder
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
        own = _likely(told.token, told.logprob, words)
        top = [_likely(token, logprob, words) for token, logprob in told.top]
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


class Offsets:
    """Counts characters of a text token by token, also where a character has several tokens."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.at = 0
        """Characters that are whole so far: where the next token begins, or goes on."""

    def add(self, spelled: bytes) -> None:
        """Go on by the bytes of a token."""
        self.at += len(self._decoder.decode(spelled))


def completion_logprobs(
    tokens: Sequence[TokenLogprob], words: Words, *, offsets: Sequence[int], most: int
) -> CompletionLogprobs:
    """Return them as completions tell them.

    Args:
        tokens: What the engine said.
        words: The texts of tokens.
        offsets: Where in the answer each of them begins.
        most: How many of the likeliest were asked for; the token itself is told beside them.
    """
    top: list[dict[str, float] | None] = []
    for told in tokens:
        named = {shown(token, words): finite(logprob) for token, logprob in told.top[:most]}
        named.setdefault(shown(told.token, words), finite(told.logprob))
        top.append(named)
    return CompletionLogprobs(
        [shown(told.token, words) for told in tokens],
        [finite(told.logprob) for told in tokens],
        top,
        list(offsets),
    )


def shown(token: int, words: Words) -> str:
    """Return a token's text; bytes that are none are written out, as OpenAI's completions do."""
    spelled = words.spelled(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


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
    spelled = words.spelled(token)
    return LikelyToken(spelled.decode(errors="replace"), finite(logprob), list(spelled))
