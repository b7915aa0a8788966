"""`RolloutWorker`: a worker of the pool, through all its lives: its requests and its state."""

import time
from typing import NamedTuple

from meshwright.run.posttrain.workers.worker_link import WorkerLink
from meshwright.run.posttrain.workers.worker_main import TAKE
from meshwright.run.serve.engine_client import MEMORY_TAGS, MemoryTag
from meshwright.run.serve.request import OutputSink, Request
from meshwright.run.serve.worker.protocol import UtilityCall


class PendingRequest(NamedTuple):
    """An ask under way."""

    request_id: int
    request: Request
    sink: OutputSink
    worker_index: int


class WorkerReady(NamedTuple):
    """The engine of a worker is ready."""

    link: WorkerLink


class WorkerLost(NamedTuple):
    """A worker ended, or could not be started."""

    why: str
    error: BaseException | None = None


class RolloutWorker:
    """One worker of the pool, through all its lives."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.incarnation = 0
        self.link: WorkerLink | None = None
        self.pending_requests: dict[int, PendingRequest] = {}
        """What it has not answered."""
        self.submitted_batches: list[list[PendingRequest]] = []
        """All that it was asked since it last had nothing to do, as it was sent."""
        self.aborted_ids: set[int] = set()
        self.pending_calls: dict[int, UtilityCall] = {}
        self.weights_version: int | None = None
        self.step_count, self.last_progress_s = 0, time.monotonic()
        self.awake_tags: frozenset[MemoryTag] = frozenset(MEMORY_TAGS)
        self.is_down = False
        """It died while all slept, and is started when they wake: others have its memory."""

    def reset(self) -> None:
        """Forget what the process knew that has ended."""
        self.link, self.weights_version, self.awake_tags = None, None, frozenset(MEMORY_TAGS)
        self.step_count, self.last_progress_s = 0, time.monotonic()
        self.pending_calls, self.incarnation = {}, self.incarnation + 1

    def record_memory_call(self, call: UtilityCall) -> None:
        """Know that it has gone to sleep, or that some of its memory is awake."""
        self.awake_tags = (
            frozenset() if call.method == "sleep" else self.awake_tags.union(call.memory_tags)
        )

    def describe_activity(self) -> str:
        """Say what it does, in words."""
        if self.link is None:
            return "while it started"
        if any(call.method == TAKE for call in self.pending_calls.values()):
            return "while it took weights"
        if self.pending_requests:
            return f"with {len(self.pending_requests):,} running requests"
        return "while it had nothing to do"
