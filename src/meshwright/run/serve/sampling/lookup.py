"""`PromptLookup`: guesses the next tokens from what stands in the text already."""

from collections.abc import Sequence

_FIRST, _MOST = 8, 64
"""Proposals worth making: at first, and at most."""
_REST = 16
"""Tokens to wait for after proposals were wrong a few times in a row."""


class PromptLookup:
    """Proposes what followed the last time that the same few tokens came: in code, in summaries.

    Each place is found by one look into a table that grows with the text. Checking proposals is not
    free where many requests run, so fewer are made while they turn out wrong, and none for a while
    where they keep doing so.
    """

    def __init__(self, prompt: Sequence[int], *, shortest: int = 2, longest: int = 4) -> None:
        self._tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._proposed: list[int] = []
        self._worth = _FIRST
        self._resting = 0
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Go on with tokens of the answer."""
        self._judge(tokens)
        for token in tokens:
            at = len(self._tokens)
            # Entered only now that something follows, so that the end of a text never finds itself.
            for length in self._lengths:
                if length <= at:
                    self._after[tuple(self._tokens[at - length :])] = at
            self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens; none where the last few tokens are new."""
        most = min(most, self._worth)
        for length in self._lengths if most else ():
            at = self._after.get(tuple(self._tokens[-length:]))
            if at is not None and length <= len(self._tokens):
                self._proposed = self._tokens[at : at + most]
                return self._proposed
        return []

    def _judge(self, tokens: Sequence[int]) -> None:
        """Learn from what came in place of the last proposals."""
        if not self._worth:
            self._resting -= len(tokens)
            self._worth = int(self._resting <= 0)
        if not self._proposed or not tokens:
            return
        right = 0
        for guess, token in zip(self._proposed, tokens, strict=False):
            if guess != token:
                break
            right += 1
        if right == len(self._proposed):
            self._worth = min(2 * self._worth, _MOST)
        else:
            self._worth = right + 1 if right else self._worth // 2
        if not self._worth:
            self._resting = _REST
        self._proposed = []
