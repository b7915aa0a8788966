"""`Worker`: one of a fleet, through all its lives: what it was asked, and what it knows."""

import time
from typing import NamedTuple

from meshwright.run.posttrain.workers.links import Link
from meshwright.run.posttrain.workers.process import TAKE
from meshwright.run.serve.asked import Ask, Sink
from meshwright.run.serve.interface import MEMORY, Memory
from meshwright.run.serve.worker.frames import Call


class Ticket(NamedTuple):
    """An ask under way."""

    number: int
    ask: Ask
    sink: Sink
    worker: int


class Worker:
    """One of the fleet, through all its lives."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.life = 0
        self.link: Link | None = None
        self.open: dict[int, Ticket] = {}
        """What it has not answered."""
        self.order: list[list[Ticket]] = []
        """All that it was asked since it last had nothing to do, as it was sent."""
        self.cancelled: set[int] = set()
        self.calls: dict[int, Call] = {}
        self.version: int | None = None
        self.steps, self.progress_s = 0, time.monotonic()
        self.awake: frozenset[Memory] = frozenset(MEMORY)
        self.down = False
        """It died while all slept, and is started when they wake: others have its memory."""

    def reset(self) -> None:
        """Forget what the process knew that has ended."""
        self.link, self.version, self.awake = None, None, frozenset(MEMORY)
        self.steps, self.progress_s = 0, time.monotonic()
        self.calls, self.life = {}, self.life + 1

    def rested(self, call: Call) -> None:
        """Know that it has gone to sleep, or that some of its memory is awake."""
        self.awake = frozenset() if call.what == "sleep" else self.awake.union(call.parts)

    def doing(self) -> str:
        """Say what it does, in words."""
        if self.link is None:
            return "while it started"
        if any(call.what == TAKE for call in self.calls.values()):
            return "while it took weights"
        if self.open:
            return f"with {len(self.open):,} answers under way"
        return "while it had nothing to do"
