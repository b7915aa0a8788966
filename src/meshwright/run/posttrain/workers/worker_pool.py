"""`RolloutWorkerPool`: workers that draw, as one engine; who dies is started anew and draws again.

    workers = RolloutWorkerPool(hire, 4, offered, ...)      `hire` starts a worker, returns its link
    workers.load_version(1)                                 all have version 1 of the weights
    RolloutGenerator(workers, environment, pool, drawing)   asks it as it would ask one engine

Answers come whole, so a worker's death takes nothing that anybody has seen: what it had not ended
is asked again, with the same seeds. Which worker is asked follows from the ask alone, by a
`EngineAssigner` that decides it for a simulation too. Where `exact` is set, the next life of a
worker is asked everything of its last order, also what had come, so that what is computed together,
and with it every bit, is as if it had not died.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.rollout import EngineAssigner
from meshwright.run.posttrain.weight_sync.weight_receiver import ShardsByRank, describe_sender
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender
from meshwright.run.posttrain.workers.rollout_worker import (
    PendingRequest,
    RolloutWorker,
    WorkerLost,
    WorkerReady,
)
from meshwright.run.posttrain.workers.worker_link import WorkerLink
from meshwright.run.posttrain.workers.worker_main import SOURCES, TAKE
from meshwright.run.serve.client.engine_process import EngineStartTimeoutError
from meshwright.run.serve.engine_client import MEMORY_TAGS, EngineDeadError, MemoryTag
from meshwright.run.serve.request import OutputSink, Request, RequestOutput
from meshwright.run.serve.worker.protocol import (
    AbortRequest,
    AddRequest,
    AddRequests,
    EngineHeartbeat,
    EngineMessage,
    EngineOutputs,
    RequestRejected,
    UtilityCall,
    UtilityResult,
)

WorkerStarter = Callable[[int], WorkerLink]
"""Starts the worker of a number, and returns when its engine is ready."""
_TURN_S = 0.05
"""How long a turn waits for workers: environments and verifiers have something to say as well."""
_LOOK_S = 1.0
_OVERTIME = 1.1
"""Of `stall_timeout_s`, for a start: by then a worker that is late has been ended."""


class WorkersLostError(MeshwrightError):
    """Rollout workers died more often than a run outlives."""


_WorkerEvent = WorkerReady | EngineMessage | WorkerLost


class RolloutWorkerPool:
    """Answers with the workers that live; used by one thread at a time."""

    def __init__(
        self,
        hire: WorkerStarter,
        count: int,
        sender: WeightSender,
        *,
        max_restarts: int,
        stall_timeout_s: float,
        exact: bool,
        say: Callable[[str], object],
        left: Callable[[], object] = lambda: None,
    ) -> None:
        """Start workers and tell them what is offered; `say` hears of deaths.

        `stall_timeout_s` is how long a worker may do nothing while something is wanted of it;
        `left` is called when all have ended.
        """
        self._hire, self._offered, self._say, self._left = hire, sender, say, left
        self._most, self._stall_s, self._exact = max_restarts, stall_timeout_s, exact
        self._events: queue.SimpleQueue[tuple[int, int, _WorkerEvent]] = queue.SimpleQueue()
        self._workers = [RolloutWorker(number) for number in range(count)]
        self._pending: list[PendingRequest] = []
        self._outbox: list[tuple[OutputSink, RequestOutput]] = []
        self._dealer = EngineAssigner(count)
        self._number, self._closed = 0, False
        self._awake: frozenset[MemoryTag] = frozenset(MEMORY_TAGS)
        self.restart_count = 0
        """Workers that were started anew."""
        self.health_check_count = 0
        """Times that workers were looked after: who waits for them need not watch them, too."""
        self.weights_version = 0
        self.max_model_len = 0
        try:
            for worker in self._workers:
                self._start(worker)
            self._until(lambda each: each.link is not None and not each.pending_calls)
            ready = [each.link.ready_message for each in self._workers if each.link is not None]
            self.max_model_len = min(each.max_model_len for each in ready)
        except BaseException:
            self.close()
            raise

    # What a generator asks for.

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._pending and not any(each.pending_requests for each in self._workers)

    def add_request(self, request: Request, sink: OutputSink, /) -> list[PendingRequest]:
        """Take an ask; it is sent with the next turn, along with all others until then."""
        self._number += 1
        worker = self._dealer.assign(request.routing_group, len(request.prompt_token_ids))
        ticket = PendingRequest(self._number, request, sink, worker)
        self._pending.append(ticket)
        return [ticket]

    def abort(self, tickets: Sequence[PendingRequest], /) -> None:
        """End answers that nobody waits for; what was drawn of them comes with their last piece."""
        for ticket in tickets:
            worker = self._workers[ticket.worker_index]
            if ticket in self._pending:
                self._pending.remove(ticket)
                self._outbox.append((ticket.sink, RequestOutput(finish_reason="abort")))
            elif ticket.request_id in worker.pending_requests:
                worker.aborted_ids.add(ticket.request_id)
                if worker.link is None:
                    self._drop_cancelled(worker)
                else:
                    worker.link.send(AbortRequest(ticket.request_id))

    def step(self) -> bool:
        """Send what was asked, and hear workers, waiting for a moment where they are silent."""
        self._flush()
        return self._hear(_TURN_S)

    def take_outputs(self) -> list[tuple[OutputSink, RequestOutput]]:
        """Take the pieces that are ready, with where they go."""
        ready, self._outbox = self._outbox, []
        return ready

    # What a loop does between turns.

    def load_version(self, version: int) -> None:
        """Post a version, wake weights for it and have all take it; nothing may be under way."""
        if not self.is_idle:
            what = "cannot take new weights while requests are running"
            raise InputError([Problem("workers", what, "wait for them, or cancel them")])
        self.wake_up(["weights"])
        self._offered.publish(version)
        for worker in self._workers:
            self._send_version(worker)
        self._until(lambda each: each.weights_version == version)
        self._offered.release_old_versions()
        self.weights_version = version

    def sleep(self) -> None:
        """Let all workers give up the memory of cache and weights."""
        self._rest(frozenset(), UtilityCall(0, "sleep", level=2))

    def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Let them take it again, or some of it; weights have to follow."""
        comes = tuple(part for part in parts if part not in self._awake)
        self._rest(self._awake.union(parts), UtilityCall(0, "wake", memory_tags=comes))

    def close(self) -> None:
        """End all workers, with what is under way."""
        self._closed = True
        # Before the workers: those that see it gone have nothing to clear away.
        self._offered.close()
        for worker in self._workers:
            if worker.link is not None:
                worker.link.stop()
        with contextlib.suppress(queue.Empty):  # those who came up and were not heard yet
            while True:
                if isinstance(said := self._events.get_nowait()[2], WorkerReady):
                    said.link.stop()
        self._left()

    # Workers.

    def _start(self, worker: RolloutWorker) -> None:
        args, name = (worker.index, worker.incarnation), f"rollout worker {worker.index}"
        threading.Thread(target=self._live, args=args, name=name, daemon=True).start()

    def _live(self, number: int, life: int) -> None:
        """Start a worker and listen to it until it is gone, in a thread of its own."""
        try:
            link = self._hire(number)
        except BaseException as error:  # noqa: BLE001  raised where somebody waits for it
            self._events.put((number, life, WorkerLost(str(error), error)))
            return
        self._events.put((number, life, WorkerReady(link)))
        if self._closed:  # who closed may have looked before
            link.stop()
            return
        for message in link.receive_messages():
            self._events.put((number, life, message))
        self._events.put((number, life, WorkerLost(link.exit_reason())))

    def _hear(self, timeout_s: float) -> bool:
        """Take what there is to hear, after at most so long; return whether there was anything."""
        try:
            return self._heard(timeout_s)
        except BaseException:
            # Who closes what asked for them would wait for answers that never come.
            self._pending = []
            for worker in self._workers:
                worker.pending_requests, worker.submitted_batches, worker.aborted_ids = (
                    {},
                    [],
                    set(),
                )
            raise

    def _heard(self, timeout_s: float) -> bool:
        self.health_check_count += 1
        heard = 0
        with contextlib.suppress(queue.Empty):
            while True:
                wait_s = 0.0 if heard else timeout_s
                number, life, said = self._events.get(block=wait_s > 0, timeout=wait_s)
                heard += 1
                worker = self._workers[number]
                if life == worker.incarnation:
                    self._take(worker, said)
                elif isinstance(said, WorkerReady):
                    said.link.stop()
        # Also where others talk; but only once all that was said is heard.
        self._end_the_stuck()
        return heard > 0

    def _take(self, worker: RolloutWorker, said: _WorkerEvent) -> None:
        match said:
            case WorkerReady(link):
                self._begin(worker, link)
            case WorkerLost():
                self._gone(worker, said)
            case EngineOutputs(pieces):
                worker.last_progress_s = time.monotonic()
                for number, piece in pieces:
                    # What is not open has come before, from the worker's last life.
                    if (ticket := worker.pending_requests.pop(number, None)) is not None:
                        self._outbox.append((ticket.sink, piece))
                        worker.aborted_ids.discard(number)
                if not worker.pending_requests:
                    worker.submitted_batches = []
            case EngineHeartbeat(gauges):
                if gauges.steps != worker.step_count:
                    worker.step_count, worker.last_progress_s = gauges.steps, time.monotonic()
            case UtilityResult(number, _, told):
                self._done(worker, worker.pending_calls.pop(number), told)
            case RequestRejected(engine_error=why) if why:
                self._gone(worker, WorkerLost(why))
            case RequestRejected(_, problems):
                where = f"rollout worker {worker.index}"
                raise InputError([Problem(f"{where}: {at}", *rest) for at, *rest in problems])

    def _begin(self, worker: RolloutWorker, link: WorkerLink) -> None:
        """Bring a worker that has just been started to where it has to be."""
        worker.link, worker.last_progress_s = link, time.monotonic()
        told = describe_sender(self._offered, link.version_folder(self._offered))
        self._call(worker, UtilityCall(0, SOURCES, payload=told))
        if self._awake != worker.awake_tags:
            # It began with all of it, of which others have some by now.
            self._call(worker, UtilityCall(0, "sleep", level=2))
            if self._awake:
                self._call(worker, UtilityCall(0, "wake", memory_tags=tuple(self._awake)))
        if "weights" in self._awake:
            self._send_version(worker)
        if self._exact:
            for tickets in worker.submitted_batches:
                self._ask(worker, tickets)
        else:
            self._ask(worker, list(worker.pending_requests.values()))

    def _done(self, worker: RolloutWorker, call: UtilityCall, told: bytes) -> None:
        worker.last_progress_s = time.monotonic()
        if call.method == SOURCES:
            self._offered.plan_transfer(msgspec.msgpack.decode(told, type=ShardsByRank))
        elif call.method == TAKE:
            worker.weights_version = call.version
        else:
            worker.record_memory_call(call)

    def _gone(self, worker: RolloutWorker, gone: WorkerLost) -> None:
        name = f"rollout worker {worker.index}"
        if worker.link is not None:
            name = f"{name} ({worker.link.name})"
            worker.link.stop()
        elif isinstance(gone.error, InputError):
            raise gone.error  # it would not start another time either
        elif isinstance(gone.error, EngineStartTimeoutError):
            raise self._late(worker) from gone.error
        elif not isinstance(gone.error, EngineDeadError):
            raise WorkersLostError(f"{name} cannot be started: {gone.why}") from gone.error
        said = f"{name} is gone {worker.describe_activity()}: {gone.why}"
        self.restart_count += 1
        if self.restart_count > self._most:
            fix = "look at its last words above, or allow more with workers.max_restarts"
            raise WorkersLostError(
                f"{said}; {self.restart_count} have died, {self._most} may: {fix}"
            )
        self._say(f"{said}; it is started anew ({self.restart_count} of {self._most})")
        self._drop_cancelled(worker)
        worker.reset()
        worker.is_down = not self._awake
        if not worker.is_down:
            self._start(worker)

    def _drop_cancelled(self, worker: RolloutWorker) -> None:
        """End answers that were cancelled and of which nothing more can come."""
        for number in sorted(worker.aborted_ids):
            ticket = worker.pending_requests.pop(number)
            self._outbox.append((ticket.sink, RequestOutput(finish_reason="abort")))
        worker.aborted_ids = set()
        if not worker.pending_requests:
            worker.submitted_batches = []

    # Messages.

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for worker in self._workers:
            tickets = [each for each in pending if each.worker_index == worker.index]
            if not tickets:
                continue
            if not worker.pending_requests:
                worker.last_progress_s = time.monotonic()
            worker.pending_requests |= {each.request_id: each for each in tickets}
            if self._exact:
                worker.submitted_batches.append(tickets)
            if worker.link is not None:
                self._ask(worker, tickets)

    def _ask(self, worker: RolloutWorker, tickets: Sequence[PendingRequest]) -> None:
        if tickets and worker.link is not None:
            worker.link.send(
                AddRequests([AddRequest(each.request_id, each.request) for each in tickets])
            )

    def _call(self, worker: RolloutWorker, call: UtilityCall) -> None:
        self._number += 1
        call = msgspec.structs.replace(call, call_id=self._number)
        worker.pending_calls[call.call_id], worker.last_progress_s = call, time.monotonic()
        if worker.link is not None:
            worker.link.send(call)

    def _send_version(self, worker: RolloutWorker) -> None:
        version = self._offered.version
        if version is not None and worker.link is not None and worker.weights_version != version:
            worker.link.deliver_version(self._offered)
            self._call(worker, UtilityCall(0, TAKE, version=version))

    def _rest(self, awake: frozenset[MemoryTag], call: UtilityCall) -> None:
        if awake == self._awake:
            return
        self._awake = awake
        for worker in self._workers:
            if worker.link is not None:
                self._call(worker, call)
            elif worker.is_down:
                worker.is_down = False
                self._start(worker)
        # Who has just been started takes the old version first, where it still lies.
        self._until(lambda each: each.awake_tags == awake and not each.pending_calls)

    def _until(self, reached: Callable[[RolloutWorker], bool]) -> None:
        """Hear workers until all of them have come to something."""
        while not all(
            each.is_down or (each.link is not None and reached(each)) for each in self._workers
        ):
            self._hear(_LOOK_S)

    def _end_the_stuck(self) -> None:
        """Take those for dead who live and do nothing of what is wanted of them."""
        now_s = time.monotonic()
        for worker in self._workers:
            still_s = now_s - worker.last_progress_s
            if worker.is_down or still_s <= self._stall_s:
                continue
            if worker.link is None:
                if still_s > self._stall_s * _OVERTIME:
                    raise self._late(worker)
            elif worker.pending_calls or worker.pending_requests:
                self._gone(worker, WorkerLost(f"it did nothing for {self._stall_s:g} s"))

    def _late(self, worker: RolloutWorker) -> WorkersLostError:
        fix = "look for room on its device, or in its cluster, or raise stall_timeout_s"
        late = f"has not started within {self._stall_s:g} s: {fix}"
        return WorkersLostError(f"rollout worker {worker.index} {late}")
