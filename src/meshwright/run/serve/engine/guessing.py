"""Guesses of the next tokens, which a step checks all at once: more than one token for one step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from meshwright.policy.batching import Batch, Batcher, State
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.placing import Drawing, checking
from meshwright.run.serve.sampling.lookup import PromptLookup

if TYPE_CHECKING:
    from torch import Tensor


class Guesses(Protocol):
    """Proposes tokens for answers whose last tokens are known."""

    def wanted(self, answers: Sequence[Answer]) -> list[int]:
        """Return how many tokens of each answer are to be checked, before the step is decided."""

    def propose(self, answers: Sequence[Answer], most: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what may come next of each answer; the step has blocks for `most` tokens."""

    def chances(self, drawing: Sequence[Drawing], ends: Sequence[int], /) -> "Tensor | None":
        """Return what the guesses of a step's lines were drawn from.

        The lines of who draws end at `ends`. None lets the same noise decide for everybody.
        """

    def drop(self, answer: Answer) -> None:
        """Forget an answer that is over, or that has made room for others."""

    def forget(self) -> None:
        """Forget what lies in the blocks: the cache or the weights are others now."""


class LookedUp:
    """Guesses what followed before, when the same tokens came."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._lookups: dict[Answer, tuple[PromptLookup, int]] = {}
        self._found: dict[Answer, tuple[int, ...]] = {}

    def wanted(self, answers: Sequence[Answer]) -> list[int]:
        """Return how many tokens followed the last ones of each answer when they came before."""
        self._found = {each: tuple(self._lookup(each).propose(self._most)) for each in answers}
        return [len(self._found[each]) for each in answers]

    def propose(self, answers: Sequence[Answer], most: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what followed the last tokens of each answer the last time they came."""
        return [self._found[each][:count] for each, count in zip(answers, most, strict=True)]

    def drop(self, answer: Answer) -> None:
        """Forget an answer that is over."""
        self._lookups.pop(answer, None)

    def chances(self, _drawing: Sequence[Drawing], _ends: Sequence[int], /) -> None:
        """Let the same noise decide: nothing was drawn."""

    def forget(self) -> None:
        """Forget nothing: what was written stays."""

    def _lookup(self, answer: Answer) -> PromptLookup:
        lookup, seen = self._lookups.get(answer) or (PromptLookup(()), 0)
        lookup.add(answer.ids[seen:])
        self._lookups[answer] = (lookup, len(answer.ids))
        return lookup


class Guessing:
    """The answers of an engine that check guesses, and what is guessed for them."""

    def __init__(self, guesses: Guesses, batcher: Batcher) -> None:
        self.guesses, self._batcher = guesses, batcher
        self._answers: dict[Answer, None] = {}

    def land(self, drawing: Drawing, tokens: int) -> None:
        """Take note that so many tokens came for an answer that goes on."""
        self._answers[drawing.answer] = None
        if drawing.checks:
            self._batcher.settle(drawing.answer.sequence, tokens - 1)

    def plan(self) -> None:
        """Say how much is to be guessed for all whose turn it may be."""
        answers = [each for each in self._answers if each.sequence.state is State.GUESSING]
        for answer, count in zip(answers, self.guesses.wanted(answers), strict=True):
            self._batcher.propose(answer.sequence, count)

    def fill(self, batch: Batch) -> None:
        """Guess for those whom a step lets check something; their blocks are granted."""
        for sequence in batch.preempted:
            self.guesses.drop(sequence.request)
        chunks = checking(batch)
        answers: list[Answer] = [chunk.sequence.request for chunk in chunks]
        most = [chunk.stop - chunk.start - 1 for chunk in chunks]
        for answer, guessed in zip(answers, self.guesses.propose(answers, most), strict=True):
            allowed = len(guessed) if answer.guide is None else answer.guide.allowed(guessed)
            answer.guessed = guessed[:allowed]

    def drop(self, answer: Answer) -> None:
        """Forget an answer that is over."""
        self._answers.pop(answer, None)
        self.guesses.drop(answer)
