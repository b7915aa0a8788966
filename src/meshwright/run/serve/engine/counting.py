"""`Counts`: what an engine has done since it began."""

from bisect import bisect_left
from typing import Any

from meshwright.policy.batching import Batch
from meshwright.run.serve.asked import STEP_SIZES


class Counts:
    """Numbers that only grow, as `Gauges` tells them."""

    def __init__(self) -> None:
        self.prompt_tokens = self.output_tokens = 0
        self._steps = self._step_tokens = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._drafts = self._draft_tokens = self._accepted_tokens = 0

    def step(self, batch: Batch) -> None:
        """Count a step that was started."""
        tokens = batch.decodes + sum(chunk.stop - chunk.start for chunk in batch.chunks)
        self._steps += 1
        self._step_tokens += tokens
        self._step_sizes[bisect_left(STEP_SIZES, tokens)] += 1

    def draft(self, guessed: int, right: int) -> None:
        """Count a guess that was checked."""
        self._drafts += 1
        self._draft_tokens += guessed
        self._accepted_tokens += right

    def told(self) -> dict[str, Any]:
        """Return all of it by the names of gauges."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "steps": self._steps,
            "step_tokens": self._step_tokens,
            "step_sizes": tuple(self._step_sizes),
            "drafts": self._drafts,
            "draft_tokens": self._draft_tokens,
            "accepted_tokens": self._accepted_tokens,
        }
