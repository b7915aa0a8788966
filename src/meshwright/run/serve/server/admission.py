"""`AdmissionController`: counts running requests, refuses too many, and drains them at shutdown.

A request waits until its first token is there. Waiting requests are what an engine cannot keep up
with, so their number is what the server bounds.
"""

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Protocol

from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.tracing import TraceSpan

FIRST_TOKEN_WINDOW = 128
"""First tokens that the present rate is taken from."""
MAX_RETRY_AFTER_S = 60


class OpenResource(Protocol):
    """Something of a request that has to be let go of when it ends."""

    async def close(self) -> None:
        """Let go of it."""

    def annotate_span(self, span: TraceSpan) -> None:
        """Say on the request's span what it was."""


class RequestContext:
    """One request of a client, from its body to its last byte."""

    def __init__(self, request_id: str, tenant: str, task: asyncio.Task[object]) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.task = task
        self.abort_error: ApiError | None = None
        """Why it has to end before its time."""
        self.is_disconnected = False
        """Whether its client is."""
        self.error: ApiError | None = None
        """What went wrong with it, also where its status was out already."""
        self.field_names: Mapping[str, str] = {}
        """What it calls things that the engine has other names for."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.open_resources: list[OpenResource] = []
        """What it holds of the engine."""

    def abort(self, fault: ApiError) -> None:
        """Break it off, telling the client why where it is still there."""
        if self.abort_error is None:
            self.abort_error = fault
            self.task.cancel()

    def abort_on_disconnect(self) -> None:
        """Break it off: its client is gone."""
        self.is_disconnected = True
        self.abort(ApiError(499, "The client is gone"))

    def take_abort_reason(self) -> ApiError | None:
        """Return why it was cancelled, and take the cancellation back; None where it was not us."""
        if self.abort_error is not None:
            self.task.uncancel()
        return self.abort_error


class AdmissionController:
    """The requests under way."""

    def __init__(self, max_queued_requests: int) -> None:
        self.max_queued_requests = max_queued_requests
        self.queued_requests = 0
        self.is_draining = False
        self.must_drain_now = False
        """Whether those under way have to end at once."""
        self.requests: set[RequestContext] = set()
        self._firsts: deque[float] = deque(maxlen=FIRST_TOKEN_WINDOW)

    def check_capacity(self) -> None:
        """Raise where no further request can be taken."""
        if self.is_draining:
            raise ApiError(503, "Server is shutting down.", code="draining", retry_after_s=5)
        if self.queued_requests >= self.max_queued_requests:
            retry_s = self.retry_after_s()
            raise ApiError(
                429,
                f"Request queue is full ({self.queued_requests} waiting). Retry after {retry_s} s.",
                code="queue_full",
                retry_after_s=retry_s,
            )

    def record_queued(self) -> None:
        """Count an ask that begins to wait."""
        self.queued_requests += 1

    def record_first_token(self) -> None:
        """Note that an ask has its first token."""
        self.queued_requests -= 1
        self._firsts.append(monotonic())

    def record_early_end(self) -> None:
        """Note that an ask ended without one."""
        self.queued_requests -= 1

    def retry_after_s(self) -> int:
        """Return in how many seconds half of those who wait will have had their turn."""
        if len(self._firsts) < 2:
            return 1
        rate = len(self._firsts) / max(monotonic() - self._firsts[0], 1e-3)
        return min(max(math.ceil(self.queued_requests / 2 / rate), 1), MAX_RETRY_AFTER_S)

    async def drain(self, longest_s: float) -> None:
        """Take no more, and wait for those under way; who is left after a time is broken off."""
        self.is_draining = True
        deadline = monotonic() + longest_s
        while self.requests and monotonic() < deadline and not self.must_drain_now:
            await asyncio.sleep(min(0.05, longest_s))
        for call in list(self.requests):
            call.abort(
                ApiError(503, "The server went down before the answer was whole", code="draining")
            )
        # They write their last words in their own tasks.
        for _ in range(20):
            if not self.requests:
                return
            await asyncio.sleep(0.05)
