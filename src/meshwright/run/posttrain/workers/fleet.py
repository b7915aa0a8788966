"""`Fleet`: workers that draw, as one engine; who dies is started anew and draws again.

    fleet = Fleet(hire, 4, offered, ...)          `hire` starts a worker and returns the way to it
    fleet.take(1)                                 all workers have version 1 of the weights
    Generator(fleet, environment, pool, drawing)  asks it as it would ask one engine

Answers come whole, so a worker's death takes nothing that anybody has seen: what it had not ended
is asked again, with the same seeds. Which worker is asked follows from the ask alone, by a `Dealer`
that decides it for a simulation too. Where `exact` is set, the next life of a worker is asked
everything of its last order, also what had come, so that what is computed together, and with it
every bit, is as if it had not died.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.rollout import Dealer
from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.weights.taking import Targets, sources_of
from meshwright.run.posttrain.workers.links import Link
from meshwright.run.posttrain.workers.process import SOURCES, TAKE
from meshwright.run.posttrain.workers.worker import Ticket, Worker
from meshwright.run.serve.asked import Ask, Piece, Sink
from meshwright.run.serve.interface import MEMORY, EngineBroken, Memory
from meshwright.run.serve.worker.frames import (
    Answered,
    Asked,
    Beat,
    Call,
    Cancel,
    Done,
    FromWorker,
    Refused,
    Several,
)
from meshwright.run.serve.worker.launch import NotStarted

Hire = Callable[[int], Link]
"""Starts the worker of a number, and returns when its engine is ready."""
_TURN_S = 0.05
"""How long a turn waits for workers: environments and verifiers have something to say as well."""
_LOOK_S = 1.0
_OVERTIME = 1.1
"""Of `stall_s`, for a start: by then whoever starts a worker has ended it with its process."""


class WorkersLost(MeshwrightError):
    """Rollout workers died more often than a run outlives."""


class _Up(NamedTuple):
    """A worker's engine is ready."""

    link: Link


class _Gone(NamedTuple):
    """A worker ended, or could not be started."""

    why: str
    error: BaseException | None = None


_Said = _Up | FromWorker | _Gone


class Fleet:
    """Answers with the workers that live; used by one thread at a time."""

    def __init__(
        self,
        hire: Hire,
        count: int,
        offered: Offered,
        *,
        restarts: int,
        stall_s: float,
        exact: bool,
        say: Callable[[str], object],
        left: Callable[[], object] = lambda: None,
    ) -> None:
        """Start workers and tell them what is offered; `say` hears of deaths.

        `stall_s` is how long a worker may do nothing while something is wanted of it; `left` is
        called when all have ended.
        """
        self._hire, self._offered, self._say, self._left = hire, offered, say, left
        self._most, self._stall_s, self._exact = restarts, stall_s, exact
        self._events: queue.SimpleQueue[tuple[int, int, _Said]] = queue.SimpleQueue()
        self._workers = [Worker(number) for number in range(count)]
        self._pending: list[Ticket] = []
        self._outbox: list[tuple[Sink, Piece]] = []
        self._dealer = Dealer(count)
        self._number, self._closed = 0, False
        self._awake: frozenset[Memory] = frozenset(MEMORY)
        self.restarts = 0
        """Workers that were started anew."""
        self.looks = 0
        """Times that workers were looked after: who waits for them need not watch them, too."""
        self.version = 0
        self.max_length = 0
        try:
            for worker in self._workers:
                self._start(worker)
            self._until(lambda each: each.link is not None and not each.calls)
            ready = [each.link.ready for each in self._workers if each.link is not None]
            self.max_length = min(each.max_length for each in ready)
        except BaseException:
            self.close()
            raise

    # What a generator asks for.

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._pending and not any(each.open for each in self._workers)

    def add(self, ask: Ask, sink: Sink, /) -> list[Ticket]:
        """Take an ask; it is sent with the next turn, along with all others until then."""
        self._number += 1
        worker = self._dealer.send(ask.near, len(ask.prompt))
        ticket = Ticket(self._number, ask, sink, worker)
        self._pending.append(ticket)
        return [ticket]

    def cancel(self, tickets: Sequence[Ticket], /) -> None:
        """End answers that nobody waits for; what was drawn of them comes with their last piece."""
        for ticket in tickets:
            worker = self._workers[ticket.worker]
            if ticket in self._pending:
                self._pending.remove(ticket)
                self._outbox.append((ticket.sink, Piece(finish="cancelled")))
            elif ticket.number in worker.open:
                worker.cancelled.add(ticket.number)
                if worker.link is None:
                    self._drop_cancelled(worker)
                else:
                    worker.link.send(Cancel(ticket.number))

    def turn(self) -> bool:
        """Send what was asked, and hear workers, waiting for a moment where they are silent."""
        self._flush()
        return self._hear(_TURN_S)

    def outbox(self) -> list[tuple[Sink, Piece]]:
        """Take the pieces that are ready, with where they go."""
        ready, self._outbox = self._outbox, []
        return ready

    # What a loop does between turns.

    def take(self, version: int) -> None:
        """Post a version, wake weights for it and have all take it; nothing may be under way."""
        if not self.is_idle:
            what = "cannot take new weights while answers are under way"
            raise InputError([Problem("workers", what, "wait for them, or cancel them")])
        self.wake(["weights"])
        self._offered.post(version)
        for worker in self._workers:
            self._send_version(worker)
        self._until(lambda each: each.version == version)
        self._offered.settle()
        self.version = version

    def sleep(self) -> None:
        """Let all workers give up the memory of cache and weights."""
        self._rest(frozenset(), Call(0, "sleep", level=2))

    def wake(self, parts: Collection[Memory] = MEMORY) -> None:
        """Let them take it again, or some of it; weights have to follow."""
        comes = tuple(part for part in parts if part not in self._awake)
        self._rest(self._awake.union(parts), Call(0, "wake", parts=comes))

    def close(self) -> None:
        """End all workers, with what is under way."""
        self._closed = True
        # Before the workers: those that see it gone have nothing to clear away.
        self._offered.close()
        for worker in self._workers:
            if worker.link is not None:
                worker.link.end()
        with contextlib.suppress(queue.Empty):  # those who came up and were not heard yet
            while True:
                if isinstance(said := self._events.get_nowait()[2], _Up):
                    said.link.end()
        self._left()

    # Workers.

    def _start(self, worker: Worker) -> None:
        args, name = (worker.number, worker.life), f"rollout worker {worker.number}"
        threading.Thread(target=self._live, args=args, name=name, daemon=True).start()

    def _live(self, number: int, life: int) -> None:
        """Start a worker and listen to it until it is gone, in a thread of its own."""
        try:
            link = self._hire(number)
        except BaseException as error:  # noqa: BLE001  raised where somebody waits for it
            self._events.put((number, life, _Gone(str(error), error)))
            return
        self._events.put((number, life, _Up(link)))
        if self._closed:  # who closed may have looked before
            link.end()
            return
        for message in link.heard():
            self._events.put((number, life, message))
        self._events.put((number, life, _Gone(link.last_words())))

    def _hear(self, timeout_s: float) -> bool:
        """Take what there is to hear, after at most so long; return whether there was anything."""
        try:
            return self._heard(timeout_s)
        except BaseException:
            # Who closes what asked for them would wait for answers that never come.
            self._pending = []
            for worker in self._workers:
                worker.open, worker.order, worker.cancelled = {}, [], set()
            raise

    def _heard(self, timeout_s: float) -> bool:
        self.looks += 1
        heard = 0
        with contextlib.suppress(queue.Empty):
            while True:
                wait_s = 0.0 if heard else timeout_s
                number, life, said = self._events.get(block=wait_s > 0, timeout=wait_s)
                heard += 1
                worker = self._workers[number]
                if life == worker.life:
                    self._take(worker, said)
                elif isinstance(said, _Up):
                    said.link.end()
        # Also where others talk; but only once all that was said is heard.
        self._end_the_stuck()
        return heard > 0

    def _take(self, worker: Worker, said: _Said) -> None:
        match said:
            case _Up(link):
                self._begin(worker, link)
            case _Gone():
                self._gone(worker, said)
            case Answered(pieces):
                worker.progress_s = time.monotonic()
                for number, piece in pieces:
                    # What is not open has come before, from the worker's last life.
                    if (ticket := worker.open.pop(number, None)) is not None:
                        self._outbox.append((ticket.sink, piece))
                        worker.cancelled.discard(number)
                if not worker.open:
                    worker.order = []
            case Beat(gauges):
                if gauges.steps != worker.steps:
                    worker.steps, worker.progress_s = gauges.steps, time.monotonic()
            case Done(number, _, told):
                self._done(worker, worker.calls.pop(number), told)
            case Refused(failed=why) if why:
                self._gone(worker, _Gone(why))
            case Refused(_, problems):
                where = f"rollout worker {worker.number}"
                raise InputError([Problem(f"{where}: {at}", *rest) for at, *rest in problems])

    def _begin(self, worker: Worker, link: Link) -> None:
        """Bring a worker that has just been started to where it has to be."""
        worker.link, worker.progress_s = link, time.monotonic()
        told = sources_of(self._offered, link.folder(self._offered))
        self._call(worker, Call(0, SOURCES, told=told))
        if self._awake != worker.awake:
            # It began with all of it, of which others have some by now.
            self._call(worker, Call(0, "sleep", level=2))
            if self._awake:
                self._call(worker, Call(0, "wake", parts=tuple(self._awake)))
        if "weights" in self._awake:
            self._send_version(worker)
        if self._exact:
            for tickets in worker.order:
                self._ask(worker, tickets)
        else:
            self._ask(worker, list(worker.open.values()))

    def _done(self, worker: Worker, call: Call, told: bytes) -> None:
        worker.progress_s = time.monotonic()
        if call.what == SOURCES:
            self._offered.agree(msgspec.msgpack.decode(told, type=Targets))
        elif call.what == TAKE:
            worker.version = call.version
        else:
            worker.rested(call)

    def _gone(self, worker: Worker, gone: _Gone) -> None:
        name = f"rollout worker {worker.number}"
        if worker.link is not None:
            name = f"{name} ({worker.link.name})"
            worker.link.end()
        elif isinstance(gone.error, InputError):
            raise gone.error  # it would not start another time either
        elif isinstance(gone.error, NotStarted):
            raise self._late(worker) from gone.error
        elif not isinstance(gone.error, EngineBroken):
            raise WorkersLost(f"{name} cannot be started: {gone.why}") from gone.error
        said = f"{name} is gone {worker.doing()}: {gone.why}"
        self.restarts += 1
        if self.restarts > self._most:
            fix = "look at its last words above, or allow more with workers.restarts"
            raise WorkersLost(f"{said}; {self.restarts} have died, {self._most} may: {fix}")
        self._say(f"{said}; it is started anew ({self.restarts} of {self._most})")
        self._drop_cancelled(worker)
        worker.reset()
        worker.down = not self._awake
        if not worker.down:
            self._start(worker)

    def _drop_cancelled(self, worker: Worker) -> None:
        """End answers that were cancelled and of which nothing more can come."""
        for number in sorted(worker.cancelled):
            ticket = worker.open.pop(number)
            self._outbox.append((ticket.sink, Piece(finish="cancelled")))
        worker.cancelled = set()
        if not worker.open:
            worker.order = []

    # Messages.

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for worker in self._workers:
            tickets = [each for each in pending if each.worker == worker.number]
            if not tickets:
                continue
            if not worker.open:
                worker.progress_s = time.monotonic()
            worker.open |= {each.number: each for each in tickets}
            if self._exact:
                worker.order.append(tickets)
            if worker.link is not None:
                self._ask(worker, tickets)

    def _ask(self, worker: Worker, tickets: Sequence[Ticket]) -> None:
        if tickets and worker.link is not None:
            worker.link.send(Several([Asked(each.number, each.ask) for each in tickets]))

    def _call(self, worker: Worker, call: Call) -> None:
        self._number += 1
        call = msgspec.structs.replace(call, number=self._number)
        worker.calls[call.number], worker.progress_s = call, time.monotonic()
        if worker.link is not None:
            worker.link.send(call)

    def _send_version(self, worker: Worker) -> None:
        version = self._offered.version
        if version is not None and worker.link is not None and worker.version != version:
            worker.link.bring(self._offered)
            self._call(worker, Call(0, TAKE, version=version))

    def _rest(self, awake: frozenset[Memory], call: Call) -> None:
        if awake == self._awake:
            return
        self._awake = awake
        for worker in self._workers:
            if worker.link is not None:
                self._call(worker, call)
            elif worker.down:
                worker.down = False
                self._start(worker)
        # Who has just been started takes the old version first, where it still lies.
        self._until(lambda each: each.awake == awake and not each.calls)

    def _until(self, reached: Callable[[Worker], bool]) -> None:
        """Hear workers until all of them have come to something."""
        while not all(
            each.down or (each.link is not None and reached(each)) for each in self._workers
        ):
            self._hear(_LOOK_S)

    def _end_the_stuck(self) -> None:
        """Take those for dead who live and do nothing of what is wanted of them."""
        now_s = time.monotonic()
        for worker in self._workers:
            still_s = now_s - worker.progress_s
            if worker.down or still_s <= self._stall_s:
                continue
            if worker.link is None:
                if still_s > self._stall_s * _OVERTIME:
                    raise self._late(worker)
            elif worker.calls or worker.open:
                self._gone(worker, _Gone(f"it did nothing for {self._stall_s:g} s"))

    def _late(self, worker: Worker) -> WorkersLost:
        fix = "look for room on its device, or in its cluster, or raise stall_s"
        late = f"has not started within {self._stall_s:g} s: {fix}"
        return WorkersLost(f"rollout worker {worker.number} {late}")
