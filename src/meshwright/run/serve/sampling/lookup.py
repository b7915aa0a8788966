"""`PromptLookup`: guesses the next tokens from what stands in the text already."""

from collections.abc import Sequence

from meshwright.run.serve.sampling.worth import Worth

_FIRST, _MOST = 8, 64
"""Proposals worth making: at first, and at most."""


class PromptLookup:
    """Proposes what followed the last time that the same few tokens came: in code, in summaries.

    Each place is found by one look into a table that grows with the text. Fewer are proposed while
    they turn out wrong, and none for a while where they keep doing so.
    """

    def __init__(self, prompt: Sequence[int], *, shortest: int = 2, longest: int = 4) -> None:
        self._tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._proposed: list[int] = []
        self._worth = Worth(_FIRST, _MOST)
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Go on with tokens of the answer."""
        self._worth.judge(self._proposed, tokens)
        if tokens:
            self._proposed = []
        for token in tokens:
            at = len(self._tokens)
            # Entered only now that something follows, so that the end of a text never finds itself.
            for length in self._lengths:
                if length <= at:
                    self._after[tuple(self._tokens[at - length :])] = at
            self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens; none where the last few tokens are new."""
        most = min(most, self._worth.count)
        for length in self._lengths if most else ():
            at = self._after.get(tuple(self._tokens[-length:]))
            if at is not None and length <= len(self._tokens):
                self._proposed = self._tokens[at : at + most]
                return self._proposed
        return []
