"""`LoRARequestStats`: adapters of running and waiting requests, for load balancers."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from meshwright.policy.serving.scheduler import SchedulerOutput
from meshwright.policy.serving.sequence import SequenceStatus
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.engine_stats import STEP_SIZE_BUCKETS


class LoRARequestStats:
    """The open answers of an engine that use an adapter."""

    def __init__(self) -> None:
        self._open: dict[SequenceState, None] = {}

    def add(self, states: Iterable[SequenceState]) -> None:
        """Count answers that were taken, where they use one."""
        for answer in states:
            if answer.request.lora_name is not None and answer.finish_reason is None:
                self._open[answer] = None

    def remove(self, state: SequenceState) -> None:
        """Count an answer no longer."""
        self._open.pop(state, None)

    def snapshot(self) -> dict[str, Any]:
        """Return the adapters by the names of gauges; any thread may ask."""
        running, waiting = set[str](), set[str]()
        for answer in list(self._open):
            name, sequence = answer.request.lora_name, answer.sequence
            if name is None:
                continue
            if answer.row >= 0:
                running.add(name)
            elif (
                sequence.status is SequenceStatus.WAITING and sequence.arrival_order >= 0
            ):  # no fork to be
                waiting.add(name)
        return {
            "running_adapters": tuple(sorted(running)),
            "waiting_adapters": tuple(sorted(waiting)),
        }


class EngineCounters:
    """Numbers that only grow, as `EngineStats` tells them."""

    def __init__(self) -> None:
        self.prompt_tokens = self.output_tokens = 0
        self._steps = self._step_tokens = 0
        self._step_sizes = [0] * (len(STEP_SIZE_BUCKETS) + 1)
        self._drafts = self._draft_tokens = self._accepted_tokens = 0

    def record_step(self, batch: SchedulerOutput) -> None:
        """Count a step that was started."""
        tokens = batch.num_decodes + sum(chunk.stop - chunk.start for chunk in batch.chunks)
        self._steps += 1
        self._step_tokens += tokens
        self._step_sizes[bisect_left(STEP_SIZE_BUCKETS, tokens)] += 1

    def record_draft(self, guessed: int, right: int) -> None:
        """Count a guess that was checked."""
        self._drafts += 1
        self._draft_tokens += guessed
        self._accepted_tokens += right

    def snapshot(self) -> dict[str, Any]:
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
