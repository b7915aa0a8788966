"""Guesses of the next tokens, which a step checks all at once: more than one token for one step."""

from collections.abc import Sequence
from typing import Protocol

from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.sampling.lookup import PromptLookup


class Guesses(Protocol):
    """Proposes tokens for answers whose last tokens are known."""

    def propose(self, answers: Sequence[Answer]) -> list[tuple[int, ...]]:
        """Return what may come next of each answer, nothing where that cannot be said."""

    def drop(self, answer: Answer) -> None:
        """Forget an answer that is over."""


class LookedUp:
    """Guesses what followed before, when the same tokens came."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._lookups: dict[Answer, tuple[PromptLookup, int]] = {}

    def propose(self, answers: Sequence[Answer]) -> list[tuple[int, ...]]:
        """Return what followed the last tokens of each answer the last time they came."""
        return [tuple(self._lookup(answer).propose(self._most)) for answer in answers]

    def drop(self, answer: Answer) -> None:
        """Forget an answer that is over."""
        self._lookups.pop(answer, None)

    def _lookup(self, answer: Answer) -> PromptLookup:
        lookup, seen = self._lookups.get(answer) or (PromptLookup(()), 0)
        lookup.add(answer.ids[seen:])
        self._lookups[answer] = (lookup, len(answer.ids))
        return lookup
