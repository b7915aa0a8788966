"""`Written`: the text of an answer as its tokens come, without decoding it all again each time.

Only the last few tokens are decoded: those since the text was last whole, after the stretch before
for context (decoders drop the space before a first word). A character may be spread over tokens, so
a stretch that ends in "�" is held back until it is whole, or too long to be one character.
"""

from collections.abc import Callable, Sequence

# A character has at most 4 bytes: so many tokens of one byte each can be waiting for another.
_WAITING = 3
# Wrong bytes without an end must not make a stretch that is decoded again and again.
_LONG = 16


class Written:
    """Text from tokens; `decode` is that of a tokenizer, which may leave special tokens out."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        """The context, then what came since."""
        self._context = 0
        self._told = 0
        """Characters of these tokens' text that were returned before."""

    def add(self, token: int) -> str:
        """Return the text that is certain now that this token came."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("�"):
            return self._cut(text) if len(self._tokens) - self._context >= _LONG else ""
        piece = text[self._told :]
        if piece:
            self._begin(self._tokens[self._context :])
        elif self._context:
            # Left out by the decoder: of no use as context.
            del self._tokens[self._context :]
        return piece

    def end(self) -> str:
        """Return what was held back."""
        text = self._decode(self._tokens)
        piece = text[self._told :]
        self._told = len(text)
        return piece

    def _begin(self, context: list[int]) -> None:
        self._tokens = context
        self._context = len(context)
        self._told = len(self._decode(context))

    def _cut(self, text: str) -> str:
        """Give up on bytes that are no character, where a cut between tokens changes no text."""
        until = len(self._tokens) - 2 * _WAITING
        before = self._decode(self._tokens[:until])
        if before + self._decode(self._tokens[until:]) != text:
            return ""
        piece = before[self._told :]
        self._tokens, self._context, self._told = self._tokens[until:], 0, 0
        return piece
