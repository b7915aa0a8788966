"""`Traffic`: how many requests are under way, when another is too many, and the end of all.

A request waits until its first token is there. Waiting requests are what an engine cannot keep up
with, so their number is what the server bounds.
"""

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Protocol

from meshwright.run.serve.server.faults import Fault
from meshwright.run.serve.server.spans import Span

REMEMBERED = 128
"""First tokens that the present rate is taken from."""
LONGEST_RETRY_S = 60


class Open(Protocol):
    """Something of a request that has to be let go of when it ends."""

    async def close(self) -> None:
        """Let go of it."""

    def tell(self, span: Span) -> None:
        """Say on the request's span what it was."""


class Call:
    """One request of a client, from its body to its last byte."""

    def __init__(self, name: str, tenant: str, task: asyncio.Task[object]) -> None:
        self.name = name
        self.tenant = tenant
        self.task = task
        self.ending: Fault | None = None
        """Why it has to end before its time."""
        self.gone = False
        """Whether its client is."""
        self.fault: Fault | None = None
        """What went wrong with it, also where its status was out already."""
        self.fields: Mapping[str, str] = {}
        """What it calls things that the engine has other names for."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.open: list[Open] = []
        """What it holds of the engine."""

    def end(self, fault: Fault) -> None:
        """Break it off, telling the client why where it is still there."""
        if self.ending is None:
            self.ending = fault
            self.task.cancel()

    def leave(self) -> None:
        """Break it off: its client is gone."""
        self.gone = True
        self.end(Fault(499, "The client is gone"))

    def why(self) -> Fault | None:
        """Return why it was cancelled, and take the cancellation back; None where it was not us."""
        if self.ending is not None:
            self.task.uncancel()
        return self.ending


class Traffic:
    """The requests under way."""

    def __init__(self, most_waiting: int) -> None:
        self.most_waiting = most_waiting
        self.waiting = 0
        self.draining = False
        self.hurried = False
        """Whether those under way have to end at once."""
        self.calls: set[Call] = set()
        self._firsts: deque[float] = deque(maxlen=REMEMBERED)

    def check(self) -> None:
        """Raise where no further request can be taken."""
        if self.draining:
            raise Fault(503, "The server is going down", code="draining", retry_s=5)
        if self.waiting >= self.most_waiting:
            raise Fault(
                429,
                f"{self.waiting} requests wait already; try again later",
                code="too_many_waiting",
                retry_s=self.retry_s(),
            )

    def asked(self) -> None:
        """Count an ask that begins to wait."""
        self.waiting += 1

    def first(self) -> None:
        """Note that an ask has its first token."""
        self.waiting -= 1
        self._firsts.append(monotonic())

    def abandoned(self) -> None:
        """Note that an ask ended without one."""
        self.waiting -= 1

    def retry_s(self) -> int:
        """Return in how many seconds half of those who wait will have had their turn."""
        if len(self._firsts) < 2:
            return 1
        rate = len(self._firsts) / max(monotonic() - self._firsts[0], 1e-3)
        return min(max(math.ceil(self.waiting / 2 / rate), 1), LONGEST_RETRY_S)

    async def drain(self, longest_s: float) -> None:
        """Take no more, and wait for those under way; who is left after a time is broken off."""
        self.draining = True
        deadline = monotonic() + longest_s
        while self.calls and monotonic() < deadline and not self.hurried:
            await asyncio.sleep(min(0.05, longest_s))
        for call in list(self.calls):
            call.end(
                Fault(503, "The server went down before the answer was whole", code="draining")
            )
        # They write their last words in their own tasks.
        for _ in range(20):
            if not self.calls:
                return
            await asyncio.sleep(0.05)
