"""`SimulatedKVTransfer`: keys and values of prompts on their way from the engines that made them.

Who decodes takes them when it has blocks and a place for them; until they are there, the engine
that made them keeps its own. So a full engine holds up those before it. Each engine, or each group
of its GPUs with requests of its own, sends and receives one prompt at a time over all its links.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapreplace
from math import inf
from typing import Protocol

from meshwright.policy.serving.router import RequestRouter
from meshwright.policy.serving.scheduler import Sequence as ServingSequence
from meshwright.predict.serving.sim.simulated_engine import SimulatedEngine
from meshwright.spec.workload import WorkloadRequest

KVTransferTime = Callable[[int], float]
"""Seconds in which the keys and values of so many tokens travel."""


class PromptKV:
    """Keys and values of one prompt."""

    __slots__ = ("blocks", "kept_blocks", "request", "source", "target_engine")

    def __init__(
        self,
        request: int,
        source: SimulatedEngine,
        kept_blocks: int,
        target_engine: int,
        blocks: int,
    ) -> None:
        self.request, self.source, self.kept_blocks = request, source, kept_blocks
        self.target_engine, self.blocks = target_engine, blocks


class KVTransferHost(Protocol):
    """The simulation that keys and values travel in."""

    requests: Sequence[WorkloadRequest]
    block_size: int
    router: RequestRouter | None
    engine: list[int]
    first_s: list[float]
    left_s: dict[int, float]

    def schedule_event(self, what: SimulatedEngine | PromptKV, at_s: float) -> None:
        """Write down when something ends."""

    def enqueue(self, engine: SimulatedEngine, sequence: ServingSequence, now: float) -> None:
        """Let a sequence wait at an engine."""

    def add_frontend_delay(self, engine: SimulatedEngine, sequence: ServingSequence) -> None:
        """Count what lies around an engine in steps of the batch that a sequence joins."""


class SimulatedKVTransfer:
    """What lies between engines for prompts and engines that decode."""

    def __init__(
        self,
        fronts: Sequence[SimulatedEngine],
        decode_engines: list[SimulatedEngine],
        transfer: KVTransferTime,
        run: KVTransferHost,
    ) -> None:
        self.decode_engines, self._transfer, self._run = decode_engines, transfer, run
        self._router = RequestRouter(len(decode_engines), "least-loaded")
        self._first = len(fronts)
        self._queues: list[deque[PromptKV]] = [deque() for _ in decode_engines]
        self._coming = [0] * len(decode_engines)
        """Prompts that are on their way to each."""
        self._taken_s = [[0.0] * engine.groups for engine in (*fronts, *decode_engines)]
        """Until when the links of each engine's groups are taken, as heaps."""

    def start_transfer(
        self, engine: SimulatedEngine, sequence: ServingSequence, now: float
    ) -> bool:
        """Let a prompt's keys and values wait for their way; False where the answer is done."""
        run, number = self._run, sequence.state
        if run.router is not None:
            run.router.release(engine.number, sequence.num_prompt_tokens)
        if run.requests[number].output_tokens <= 1:
            return False
        blocks = -(-sequence.num_prompt_tokens // run.block_size)
        engine.scheduler.finish(sequence)
        # Of blocks that are shared, others may have taken the room already.
        kept = blocks if engine.scheduler.reserve_blocks(blocks, all_there_are=True) else 0
        place = self._router.assign(sequence.num_prompt_tokens)
        self._queues[place].append(PromptKV(number, engine, kept, place, blocks))
        self._move(place, now)
        return True

    def record_finished(self, engine: SimulatedEngine, sequence: ServingSequence) -> None:
        """Count an answer that is done."""
        self._router.release(engine.number - self._first, sequence.num_prompt_tokens)

    def admit_waiting(self, engine: SimulatedEngine, now: float) -> None:
        """Take what waits for an engine that has more room now."""
        place = engine.number - self._first
        if place >= 0 and self._queues[place]:
            self._move(place, now)

    def start_decoding(self, handed: PromptKV, now: float) -> None:
        """Let a sequence decode where its keys and values are now."""
        run, engine, number = self._run, self.decode_engines[handed.target_engine], handed.request
        source = handed.source
        if handed.kept_blocks:
            source.scheduler.release_reserved_blocks(handed.kept_blocks)
        if source.ends_s == inf:
            run.schedule_event(source, source.wake_up(now))
        engine.scheduler.release_reserved_blocks(handed.blocks)
        self._coming[handed.target_engine] -= 1
        asked = run.requests[number]
        # The client hears from the engine that decodes.
        run.first_s[number] = run.left_s[number] = now
        run.engine[number] = engine.number
        prompt = asked.prompt_tokens
        sequence = ServingSequence(
            prompt, asked.output_tokens, state=number, num_computed_tokens=prompt
        )
        run.add_frontend_delay(engine, sequence)
        run.enqueue(engine, sequence, now)

    def _move(self, place: int, now: float) -> None:
        """Send what has room at its goal, in order."""
        queue, engine, run = self._queues[place], self.decode_engines[place], self._run
        most = engine.scheduler.config.max_num_seqs
        while queue:
            held = engine.scheduler.num_running + engine.waiting + self._coming[place]
            if held >= most:
                return
            if engine.is_leaping:
                run.schedule_event(engine, engine.truncate_steps(now))
            handed = queue[0]
            if not engine.scheduler.reserve_blocks(handed.blocks):
                return
            queue.popleft()
            self._coming[place] += 1
            ends = [self._taken_s[at] for at in (handed.source.number, engine.number)]
            start = max(now, *(taken[0] for taken in ends))
            there = start + self._transfer(run.requests[handed.request].prompt_tokens)
            for taken in ends:
                heapreplace(taken, there)
            run.schedule_event(handed, there)
