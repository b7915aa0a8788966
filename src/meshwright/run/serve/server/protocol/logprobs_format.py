"""How likely tokens were, as completions and as chats tell it."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from meshwright.run.serve.request import TokenLogprob
from meshwright.run.serve.server.protocol.response_schema import (
    ChatChoiceLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

MIN_LOGPROB = -9999.0
"""What is told of a token that could not come: JSON has no minus infinity."""


def format_chat_logprobs(
    tokens: Iterable[TokenLogprob], tokenizer: TokenizerLike
) -> ChatChoiceLogprobs:
    """Return them as chats tell them."""
    content = []
    for told in tokens:
        own = _likely(told.token_id, told.logprob, tokenizer)
        top = [_likely(token, logprob, tokenizer) for token, logprob in told.top_logprobs]
        content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, top))
    return ChatChoiceLogprobs(content)


def encode_chat_logprobs(tokens: Iterable[TokenLogprob], tokenizer: TokenizerLike) -> bytes:
    """Return the items of `content` as JSON, without the brackets around them."""
    return msgspec.json.encode(format_chat_logprobs(tokens, tokenizer).content)[1:-1]


def join_chat_logprobs(parts: Sequence[bytes]) -> ChatChoiceLogprobs:
    """Return items that are JSON already as one value; encoding it only copies them."""
    joined = msgspec.Raw(b'{"content":[%b],"refusal":null}' % b",".join(parts))
    return cast("ChatChoiceLogprobs", joined)


class TextOffsets:
    """Counts characters of a text token by token, also where a character has several tokens."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.offset = 0
        """Characters that are whole so far: where the next token begins, or goes on."""

    def add(self, spelled: bytes) -> None:
        """Go on by the bytes of a token."""
        self.offset += len(self._decoder.decode(spelled))


def format_completion_logprobs(
    tokens: Sequence[TokenLogprob], tokenizer: TokenizerLike, *, offsets: Sequence[int], most: int
) -> CompletionLogprobs:
    """Return them as completions tell them.

    Args:
        tokens: What the engine said.
        tokenizer: The texts of tokens.
        offsets: Where in the answer each of them begins.
        most: How many of the likeliest were asked for; the token itself is told beside them.
    """
    top: list[dict[str, float] | None] = []
    for told in tokens:
        named = {
            format_token(token, tokenizer): clamp_logprob(logprob)
            for token, logprob in told.top_logprobs[:most]
        }
        named.setdefault(format_token(told.token_id, tokenizer), clamp_logprob(told.logprob))
        top.append(named)
    return CompletionLogprobs(
        [format_token(told.token_id, tokenizer) for told in tokens],
        [clamp_logprob(told.logprob) for told in tokens],
        top,
        list(offsets),
    )


def format_token(token: int, tokenizer: TokenizerLike) -> str:
    """Return a token's text; bytes that are none are written out, as OpenAI's completions do."""
    spelled = tokenizer.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionLogprobsWriter:
    """Writes the logprobs of one choice as they come: at its end they are only copied."""

    def __init__(self) -> None:
        self._fields: dict[str, list[bytes]] = {
            name: [] for name in CompletionLogprobs.__struct_fields__
        }

    def add(self, part: CompletionLogprobs) -> None:
        """Write the logprobs of the next tokens."""
        for name, written in self._fields.items():
            if values := getattr(part, name):
                written.append(msgspec.json.encode(values)[1:-1])

    def join(self) -> CompletionLogprobs | None:
        """Return all as one value; None where there are none."""
        if not self._fields["tokens"]:
            return None
        fields = b",".join(
            b'"%b":[%b]' % (name.encode(), b",".join(parts)) for name, parts in self._fields.items()
        )
        return cast("CompletionLogprobs", msgspec.Raw(b"{%b}" % fields))


def merge_completion_logprobs(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    """Return several as one."""
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.tokens.extend(part.tokens)
        whole.token_logprobs.extend(part.token_logprobs)
        whole.top_logprobs.extend(part.top_logprobs)
        whole.text_offset.extend(part.text_offset)
    return whole


def clamp_logprob(logprob: float) -> float:
    """Return a logprob that JSON can hold."""
    return max(logprob, MIN_LOGPROB)


def _likely(token: int, logprob: float, tokenizer: TokenizerLike) -> TopLogprob:
    spelled = tokenizer.token_bytes(token)
    return TopLogprob(spelled.decode(errors="replace"), clamp_logprob(logprob), list(spelled))
