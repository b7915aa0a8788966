"""`NgramIndex`: guesses the next tokens from what stands in the text already."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.run.serve.engine.input_batch import SampledRow
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.engine.spec_decode.draft_length import AdaptiveDraftLength

if TYPE_CHECKING:
    pass


_FIRST, _MOST = 8, 64
"""Proposals worth making: at first, and at most."""


class NgramIndex:
    """Proposes what followed the last time that the same few tokens came: in code, in summaries.

    Each place is found by one look into a table that grows with the text. Fewer are proposed while
    they turn out wrong, and none for a while where they keep doing so.
    """

    def __init__(self, prompt: Sequence[int], *, shortest: int = 2, longest: int = 4) -> None:
        self._tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._proposed: list[int] = []
        self._worth = AdaptiveDraftLength(_FIRST, _MOST)
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Go on with tokens of the answer."""
        self._worth.update(self._proposed, tokens)
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
        most = min(most, self._worth.length)
        for length in self._lengths if most else ():
            at = self._after.get(tuple(self._tokens[-length:]))
            if at is not None and length <= len(self._tokens):
                self._proposed = self._tokens[at : at + most]
                return self._proposed
        return []


class NgramProposer:
    """Guesses what followed before, when the same tokens came."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._lookups: dict[SequenceState, tuple[NgramIndex, int]] = {}
        self._found: dict[SequenceState, tuple[int, ...]] = {}

    def propose_lengths(self, states: Sequence[SequenceState]) -> list[int]:
        """Return how many tokens followed the last ones of each answer when they came before."""
        self._found = {each: tuple(self._lookup(each).propose(self._most)) for each in states}
        return [len(self._found[each]) for each in states]

    def propose(
        self, states: Sequence[SequenceState], most: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Return what followed the last tokens of each answer the last time they came."""
        return [self._found[each][:count] for each, count in zip(states, most, strict=True)]

    def remove(self, state: SequenceState) -> None:
        """Forget an answer that is over."""
        self._lookups.pop(state, None)

    def draft_probs(self, _drawing: Sequence[SampledRow], _ends: Sequence[int], /) -> None:
        """Let the same noise decide: nothing was drawn."""

    def reset(self) -> None:
        """Forget nothing: what was written stays."""

    def _lookup(self, state: SequenceState) -> NgramIndex:
        lookup, seen = self._lookups.get(state) or (NgramIndex(()), 0)
        lookup.add(state.token_ids[seen:])
        self._lookups[state] = (lookup, len(state.token_ids))
        return lookup
