"""`Handover`: keys and values of prompts on their way from the engines that made them.

Who decodes takes them when it has blocks and a place for them; until they are there, the engine
that made them keeps its own. So a full engine holds up those before it. Each engine, or each group
of its GPUs with requests of its own, sends and receives one prompt at a time over all its links.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapreplace
from math import inf
from typing import Protocol

from meshwright.policy.batching import Sequence as Answering
from meshwright.policy.routing import Router
from meshwright.predict.serving.clocked import Clocked
from meshwright.spec.workload import Request

Transfer = Callable[[int], float]
"""Seconds in which the keys and values of so many tokens travel."""


class Handed:
    """Keys and values of one prompt."""

    __slots__ = ("blocks", "kept", "place", "request", "source")

    def __init__(self, request: int, source: Clocked, kept: int, place: int, blocks: int) -> None:
        self.request, self.source, self.kept = request, source, kept
        self.place, self.blocks = place, blocks


class Run(Protocol):
    """The simulation that keys and values travel in."""

    requests: Sequence[Request]
    block: int
    router: Router | None
    engine: list[int]
    first_s: list[float]
    left_s: dict[int, float]

    def expect(self, what: Clocked | Handed, at_s: float) -> None:
        """Write down when something ends."""

    def enter(self, engine: Clocked, sequence: Answering, now: float) -> None:
        """Let a sequence wait at an engine."""

    def is_late(self, engine: Clocked, sequence: Answering) -> None:
        """Count what lies around an engine in steps of the batch that a sequence joins."""


class Handover:
    """What lies between engines for prompts and engines that decode."""

    def __init__(
        self, fronts: Sequence[Clocked], backs: list[Clocked], transfer: Transfer, run: Run
    ) -> None:
        self.backs, self._transfer, self._run = backs, transfer, run
        self._router = Router(len(backs), "least-loaded")
        self._first = len(fronts)
        self._queues: list[deque[Handed]] = [deque() for _ in backs]
        self._coming = [0] * len(backs)
        """Prompts that are on their way to each."""
        self._taken_s = [[0.0] * engine.groups for engine in (*fronts, *backs)]
        """Until when the links of each engine's groups are taken, as heaps."""

    def leave(self, engine: Clocked, sequence: Answering, now: float) -> bool:
        """Let a prompt's keys and values wait for their way; False where the answer is done."""
        run, number = self._run, sequence.request
        if run.router is not None:
            run.router.back(engine.number, sequence.prompt)
        if run.requests[number].output_tokens <= 1:
            return False
        blocks = -(-sequence.prompt // run.block)
        engine.batcher.end(sequence)
        # Of blocks that are shared, others may have taken the room already.
        kept = blocks if engine.batcher.reserve(blocks, all_there_are=True) else 0
        place = self._router.send(sequence.prompt)
        self._queues[place].append(Handed(number, engine, kept, place, blocks))
        self._move(place, now)
        return True

    def back(self, engine: Clocked, sequence: Answering) -> None:
        """Count an answer that is done."""
        self._router.back(engine.number - self._first, sequence.prompt)

    def go_on(self, engine: Clocked, now: float) -> None:
        """Take what waits for an engine that has more room now."""
        place = engine.number - self._first
        if place >= 0 and self._queues[place]:
            self._move(place, now)

    def arrived(self, handed: Handed, now: float) -> None:
        """Let a sequence decode where its keys and values are now."""
        run, engine, number = self._run, self.backs[handed.place], handed.request
        source = handed.source
        if handed.kept:
            source.batcher.free(handed.kept)
        if source.ends_s == inf:
            run.expect(source, source.wake(now))
        engine.batcher.free(handed.blocks)
        self._coming[handed.place] -= 1
        asked = run.requests[number]
        # The client hears from the engine that decodes.
        run.first_s[number] = run.left_s[number] = now
        run.engine[number] = engine.number
        prompt = asked.prompt_tokens
        sequence = Answering(prompt, asked.output_tokens, request=number, done=prompt)
        run.is_late(engine, sequence)
        run.enter(engine, sequence, now)

    def _move(self, place: int, now: float) -> None:
        """Send what has room at its goal, in order."""
        queue, engine, run = self._queues[place], self.backs[place], self._run
        most = engine.batcher.limits.batch_requests
        while queue:
            held = engine.batcher.running + engine.waiting + self._coming[place]
            if held >= most:
                return
            if engine.is_leaping:
                run.expect(engine, engine.cut(now))
            handed = queue[0]
            if not engine.batcher.reserve(handed.blocks):
                return
            queue.popleft()
            self._coming[place] += 1
            ends = [self._taken_s[at] for at in (handed.source.number, engine.number)]
            start = max(now, *(taken[0] for taken in ends))
            there = start + self._transfer(run.requests[handed.request].prompt_tokens)
            for taken in ends:
                heapreplace(taken, there)
            run.expect(handed, there)
