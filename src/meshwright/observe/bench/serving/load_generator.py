"""Sends requests when they are due, or keeps a number of them in flight, and watches itself.

A load generator that is itself too slow makes any server look slow, so it measures how late it
sends, how late its event loop wakes, and how much of its core it uses.
"""

import asyncio
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import msgspec
import numpy as np

from meshwright.observe.bench.serving.http_request import (
    PreparedRequest,
    ServerConnection,
    send_request,
)
from meshwright.observe.bench.serving.request_result import RequestResult

PREFETCH_REQUESTS, PREFETCH_BYTES = 4096, 16 << 20
"""Bodies that are made before they are due, and what they may take."""
MAX_SEND_DELAY_S = 0.02
"""How late one in a hundred of sends or wake-ups may be before it shows in a server's figures."""
MAX_CPU_SHARE = 0.9
"""Share of its core above which the generator cannot be trusted to read in time."""
MAX_INITIAL_ERRORS = 20
"""Requests that may fail before the first one succeeds; then nothing more is sent."""
ERROR_BACKOFF_S = 0.2
"""A client of a closed loop rests so long after a failure, lest it does nothing but fail."""
_WAKE_S = 0.01
_SHORT_S = 0.1


class GeneratorStats(msgspec.Struct, frozen=True, kw_only=True):
    """How the load generator itself fared."""

    send_delay_p99_s: float = 0.0
    """How late requests were sent: 99 of 100 were not later."""
    send_delay_max_s: float = 0.0
    event_loop_lag_p99_s: float = 0.0
    """How late the event loop woke, which is how late a token may have been seen."""
    cpu_share: float = 0.0
    """Share of one core that it used."""
    max_concurrency_seen: int = 0
    """Requests that were open at the same time."""

    @property
    def bottleneck(self) -> str:
        """Say in which way it was too slow; empty where it was not."""
        said = []
        if self.cpu_share > MAX_CPU_SHARE:
            said.append(f"client CPU {100 * self.cpu_share:.0f} % of one core")
        if self.send_delay_p99_s > MAX_SEND_DELAY_S:
            said.append(f"client send delay p99 {self.send_delay_p99_s * 1e3:.0f} ms")
        if self.event_loop_lag_p99_s > MAX_SEND_DELAY_S:
            said.append(f"client event-loop lag p99 {self.event_loop_lag_p99_s * 1e3:.0f} ms")
        return ", ".join(said)


class LoadPacing(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are let go."""

    max_concurrency: int | None = None
    """A closed loop with so many at a time; None sends each when it is due."""
    ramp_up_s: float = 0.0
    """The rate, or the number in flight, grows to its full over this time; not counted."""
    duration_s: float | None = None
    """Nothing is sent after this time, ramp included."""

    def schedule_s(self, arrival_s: float) -> float:
        """Return when a request that arrives at this time of an even stream is due.

        During a ramp r(t) = rate · t / ramp, so that t² / (2 · ramp) of the even stream has passed.
        """
        if arrival_s < self.ramp_up_s / 2:
            return math.sqrt(2 * self.ramp_up_s * arrival_s)
        return arrival_s + self.ramp_up_s / 2


class LoadRun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run."""

    results: tuple[RequestResult, ...]
    """In the order of their index."""
    generator_stats: GeneratorStats
    started_unix_s: float
    aborted: bool = False
    """Whether nothing more was sent because nothing succeeded."""


async def send_load(
    line: ServerConnection,
    requests: Iterable[PreparedRequest],
    pace: LoadPacing,
    done: Callable[[RequestResult], None],
    stop: asyncio.Event | None = None,
) -> LoadRun:
    """Send all requests at their pace and wait for every answer; `done` is told of each.

    Once `stop` is set nothing more is sent.
    """
    return await _LoadGenerator(line, pace, done, stop or asyncio.Event()).all(
        prefetch_requests(requests)
    )


def prefetch_requests(
    requests: Iterable[PreparedRequest],
    most: int = PREFETCH_REQUESTS,
    most_bytes: int = PREFETCH_BYTES,
) -> Iterator[PreparedRequest]:
    """Yield requests that were made before they are asked for, as far as memory allows."""
    source, ready, size = iter(requests), deque[PreparedRequest](), 0
    while True:
        while len(ready) < most and size < most_bytes and (one := next(source, None)) is not None:
            ready.append(one)
            size += len(one.body)
        if not ready:
            return
        size -= len(ready[0].body)
        yield ready.popleft()


def raise_file_limit() -> None:
    """Let this process have as many connections as the system permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        most = 1 << 16 if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class _LoadGenerator:
    """One run under way."""

    def __init__(
        self,
        line: ServerConnection,
        pace: LoadPacing,
        done: Callable[[RequestResult], None],
        stop: asyncio.Event,
    ) -> None:
        self._line, self._pace, self._done, self._stop = line, pace, done, stop
        self._served: list[RequestResult] = []
        self._open = self._most_open = 0
        self._succeeded = False
        self._lags: list[float] = []

    async def all(self, requests: Iterator[PreparedRequest]) -> LoadRun:
        # The first body is made before the clock starts.
        first = next(requests, None)
        requests = _again(first, requests) if first is not None else iter(())
        watching = asyncio.create_task(self._watch())
        unix, cpu, self._begun = time.time(), time.process_time(), time.perf_counter()
        try:
            if self._pace.max_concurrency is None:
                await self._open_loop(requests)
            else:
                await self._closed_loop(requests, self._pace.max_concurrency)
        finally:
            watching.cancel()
        wall_s = max(self._now(), 1e-9)
        late = [max(0.0, one.sent_s - one.scheduled_s) for one in self._served] or [0.0]
        return LoadRun(
            results=tuple(sorted(self._served, key=lambda one: one.index)),
            generator_stats=GeneratorStats(
                send_delay_p99_s=float(np.percentile(late, 99)),
                send_delay_max_s=max(late),
                event_loop_lag_p99_s=float(np.percentile(self._lags, 99)) if self._lags else 0.0,
                cpu_share=(time.process_time() - cpu) / wall_s,
                max_concurrency_seen=self._most_open,
            ),
            started_unix_s=unix,
            aborted=self._hopeless(),
        )

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    def _over(self) -> bool:
        end_s = self._pace.duration_s
        late = end_s is not None and self._now() >= end_s
        return late or self._hopeless() or self._stop.is_set()

    def _hopeless(self) -> bool:
        return not self._succeeded and len(self._served) >= MAX_INITIAL_ERRORS

    async def _open_loop(self, requests: Iterator[PreparedRequest]) -> None:
        tasks = set[asyncio.Task[bool]]()
        for one in requests:
            due_s = self._pace.schedule_s(one.scheduled_s)
            if self._pace.duration_s is not None and due_s >= self._pace.duration_s:
                break
            # Also where it is late already: answers have to be read meanwhile.
            await self._rest(max(0.0, due_s - self._now()))
            while (left_s := due_s - self._now()) > 0:  # uvloop's clock has whole milliseconds
                if self._stop.is_set():
                    break
                await asyncio.sleep(left_s)
            if self._hopeless() or self._stop.is_set():
                break
            task = asyncio.create_task(self._send(one, due_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _rest(self, seconds: float) -> None:
        """Sleep, unless it is all over before."""
        if seconds < _SHORT_S:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    async def _closed_loop(self, requests: Iterator[PreparedRequest], in_flight: int) -> None:
        async def client(number: int) -> None:
            await self._rest(self._pace.ramp_up_s * number / in_flight)
            for one in requests:  # shared by all clients: each takes the next
                if self._over():
                    return
                if not await self._send(one, self._now()):
                    await asyncio.sleep(ERROR_BACKOFF_S)

        await asyncio.gather(*(client(number) for number in range(in_flight)))

    async def _send(self, one: PreparedRequest, due_s: float) -> bool:
        self._open += 1
        self._most_open = max(self._most_open, self._open)
        try:
            served = await send_request(self._line, one, self._begun, due_s)
        finally:
            self._open -= 1
        if served.sent_s < self._pace.ramp_up_s:
            served = msgspec.structs.replace(served, in_metrics=False)
        self._served.append(served)
        self._succeeded = self._succeeded or not served.error
        self._done(served)
        return not served.error

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_WAKE_S)
            self._lags.append(time.perf_counter() - before - _WAKE_S)


def _again(first: PreparedRequest, rest: Iterator[PreparedRequest]) -> Iterator[PreparedRequest]:
    yield first
    yield from rest
