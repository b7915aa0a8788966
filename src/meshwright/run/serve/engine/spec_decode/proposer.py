"""Guesses of the next tokens, which a step checks all at once: more than one token for one step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from meshwright.policy.serving.scheduler import Scheduler, SchedulerOutput, SequenceStatus
from meshwright.run.serve.engine.input_batch import SampledRow, find_verification_chunks
from meshwright.run.serve.engine.sequence_state import SequenceState

if TYPE_CHECKING:
    from torch import Tensor


class DraftProposer(Protocol):
    """Proposes tokens for answers whose last tokens are known."""

    def propose_lengths(self, states: Sequence[SequenceState]) -> list[int]:
        """Return how many tokens of each answer are to be checked, before the step is decided."""

    def propose(
        self, states: Sequence[SequenceState], most: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Return what may come next of each answer; the step has blocks for `most` tokens."""

    def draft_probs(self, drawing: Sequence[SampledRow], ends: Sequence[int], /) -> "Tensor | None":
        """Return what the guesses of a step's lines were drawn from.

        The lines of who draws end at `ends`. None lets the same noise decide for everybody.
        """

    def remove(self, state: SequenceState) -> None:
        """Forget an answer that is over, or that has made room for others."""

    def reset(self) -> None:
        """Forget what lies in the blocks: the cache or the weights are others now."""


class SpecDecoder:
    """The answers of an engine that check guesses, and what is guessed for them."""

    def __init__(self, proposer: DraftProposer, scheduler: Scheduler) -> None:
        self.proposer, self._batcher = proposer, scheduler
        self._answers: dict[SequenceState, None] = {}

    def record_accepted(self, drawing: SampledRow, tokens: int) -> None:
        """Take note that so many tokens came for an answer that goes on."""
        self._answers[drawing.state] = None
        if drawing.verifies_drafts:
            self._batcher.accept_draft_tokens(drawing.state.sequence, tokens - 1)

    def plan_drafts(self) -> None:
        """Say how much is to be guessed for all whose turn it may be."""
        answers = [
            each for each in self._answers if each.sequence.status is SequenceStatus.SPECULATING
        ]
        for answer, count in zip(answers, self.proposer.propose_lengths(answers), strict=True):
            self._batcher.set_draft_token_count(answer.sequence, count)

    def propose_drafts(self, batch: SchedulerOutput) -> None:
        """Guess for those whom a step lets check something; their blocks are granted."""
        for sequence in batch.preempted:
            self.proposer.remove(sequence.state)
        chunks = find_verification_chunks(batch)
        answers: list[SequenceState] = [chunk.sequence.state for chunk in chunks]
        most = [chunk.stop - chunk.start - 1 for chunk in chunks]
        for answer, guessed in zip(answers, self.proposer.propose(answers, most), strict=True):
            allowed = (
                len(guessed) if answer.grammar is None else answer.grammar.count_allowed(guessed)
            )
            answer.draft_token_ids = guessed[:allowed]

    def remove(self, state: SequenceState) -> None:
        """Forget an answer that is over."""
        self._answers.pop(state, None)
        self.proposer.remove(state)
