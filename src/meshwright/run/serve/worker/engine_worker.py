"""`EngineWorker`: an engine and the messages for it, whoever brings them.

One thread takes turns, and everything but fetching happens in it. What goes wrong with one ask, or
with prompts to embed, is told to whoever wanted it and harms nobody else. So is a change of the
engine, as sleep and new weights are, that leaves it as it was. One that breaks off in its midst is
told as well, and then ends the worker: nobody knows what it left.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.serve.engine.embeddings import EmbeddingJob
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.executor.rank_commands import (
    PartialUpdateError,
    UpdateRejectedError,
)
from meshwright.run.serve.engine.lifecycle import EngineLifecycle
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.kv_transfer.handle import KVTransferError, KVTransferHandle
from meshwright.run.serve.kv_transfer.transport import receive_kv
from meshwright.run.serve.request import Request, RequestOutput, merge_outputs
from meshwright.run.serve.worker.protocol import (
    AbortRequest,
    AddRequest,
    AddRequests,
    EngineHeartbeat,
    EngineMessage,
    EngineOutputs,
    RequestRejected,
    StartEngine,
    UtilityCall,
    UtilityResult,
    WorkerMessage,
)

LOG = logging.getLogger("meshwright.server")
UtilityHandler = Callable[[UtilityCall], UtilityResult | EmbeddingJob]
"""Performs a call, or returns what is to go on with between turns."""
GRAMMAR_NICENESS = 10
_BEAT_S = 0.25
_INBOX_S = 0.01
"""How long messages are read before the next step, where requests are under way."""


class _Fetched(NamedTuple):
    """The keys and values that an ask comes with, or why they did not come."""

    asked: AddRequest
    brought: bytearray | KVTransferError


class _Validated(NamedTuple):
    """A request whose grammar was compiled, or why it cannot be answered."""

    asked: AddRequest
    error: Exception | None


class EngineWorker:
    """Does what messages say."""

    def __init__(
        self,
        send: Callable[[EngineMessage], None],
        engine: Engine,
        perform: UtilityHandler,
        *,
        whole: bool = False,
    ) -> None:
        """Send pieces as they come, or answers `whole`."""
        self._send, self._engine, self._perform = send, engine, perform
        self._whole = whole
        self._inbox: deque[WorkerMessage | _Fetched | _Validated] = deque()
        self._wake = threading.Event()
        self._answers: dict[int, list[SequenceState]] = {}
        self._ready: list[tuple[int, RequestOutput]] = []
        self._fetching: set[int] = set()
        """Asks whose keys and values are on their way, or whose grammars are compiled, and that
        nobody has cancelled."""
        self._compiling = ThreadPoolExecutor(2, "grammars", initializer=_lower_priority)
        self._embedding: dict[int, EmbeddingJob] = {}
        """Prompts to embed, those that came first in front."""
        self._beat_s = 0.0

    def post(self, *messages: WorkerMessage) -> None:
        """Hand messages over, from any thread."""
        self._inbox += messages
        self._wake.set()

    def wait_for_messages(self) -> None:
        """Wait for messages, or until somebody takes none."""
        self._wake.wait()
        self._wake.clear()

    def run_step(self) -> bool:
        """Do what was asked, then one step of the engine; tell whether there is more to do."""
        until_s = time.monotonic() + _INBOX_S
        while self._inbox:
            self._do(self._inbox.popleft())
            if time.monotonic() > until_s and not self._engine.is_idle:
                break  # many requests, or long ones: those that run get their next tokens first
        embedded = self._embed()
        worked = self._engine.step() or embedded
        for sink, piece in self._engine.take_outputs():
            sink(piece)
        now = time.monotonic()
        idle = not worked and not self._inbox and not self._embedding
        # Before the last pieces: who has them may ask no further, and has to know all figures.
        if idle or self._engine.is_idle or now - self._beat_s > _BEAT_S:
            self._beat_s = now
            self._send(EngineHeartbeat(self._engine.stats()))
        if self._ready:
            self._send(EngineOutputs(self._ready))
            self._ready = []
        return not idle

    def _do(self, message: WorkerMessage | _Fetched | _Validated) -> None:
        match message:
            case AddRequest(_, ask) if ask.sampling_params.structured_outputs is not None:
                self._compile(message)
            case AddRequest(number, ask):
                self._try(number, lambda: self._ask(number, ask))
            case _Fetched() | _Validated():
                self._go_on(message)
            case AddRequests(asks):
                for number, ask in ((each.request_id, each.request) for each in asks):
                    self._try(number, partial(self._ask, number, ask))
            case AbortRequest(number):
                self._cancel(number)
            case UtilityCall(number, "embed"):
                self._try(number, lambda: self._call(message))
            case UtilityCall():
                self._change(message)
            case StartEngine():
                pass

    def _go_on(self, done: _Fetched | _Validated) -> None:
        """Go on with a request that another thread worked for, unless it was cancelled."""
        number, ask = done.asked.request_id, done.asked.request
        if number not in self._fetching:
            return
        self._fetched(number)
        if isinstance(done, _Fetched):
            self._try(number, lambda: self._add(number, ask, done.brought))
        else:
            self._try(number, lambda: self._ask(number, ask, done.error))

    def _try(self, number: int, work: Callable[[], None]) -> bool:
        """Do something that leaves the engine as it is where it fails; tell whether it did not."""
        try:
            work()
            return True
        except MeshwrightError as error:
            self._send(to_rejection_message(number, error))
        except Exception as error:
            LOG.exception("the engine could not do what it was asked")
            self._send(_failed(number, error))
        return False

    def _compile(self, asked: AddRequest) -> None:
        """Compile the grammar of a request in a thread: large ones take seconds."""
        self._fetching.add(asked.request_id)
        self._engine.pending_external_jobs += 1

        def compile_grammar() -> None:
            error: Exception | None = None
            try:
                self._engine.validate_request(asked.request)
            except Exception as raised:  # noqa: BLE001  the client is told, in the worker's thread
                error = raised
            except BaseException as raised:  # noqa: BLE001  a panic of a library written in Rust
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            self._inbox.append(_Validated(asked, error))
            self._wake.set()

        self._compiling.submit(compile_grammar)

    def _ask(self, number: int, request: Request, error: Exception | None = None) -> None:
        if error is not None:
            raise error
        if request.remote_kv is None:
            self._add(number, request)
            return
        self._engine.validate_request(request)
        self._fetching.add(number)
        self._engine.pending_external_jobs += 1
        # It may take a while, in which the engine goes on with others.
        args = (AddRequest(number, request), request.remote_kv)
        threading.Thread(target=self._fetch, args=args, daemon=True).start()

    def _fetch(self, asked: AddRequest, handle: KVTransferHandle) -> None:
        """Fetch the keys and values that an ask comes with, in a thread of its own."""
        brought: bytearray | KVTransferError
        try:
            brought = receive_kv(handle)
        except KVTransferError as error:
            brought = error
        except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for ever
            brought = KVTransferError(f"KV transfer failed: {error!r}")
        self._inbox.append(_Fetched(asked, brought))
        self._wake.set()

    def _fetched(self, number: int) -> None:
        self._fetching.discard(number)
        self._engine.pending_external_jobs -= 1

    def _add(
        self, number: int, request: Request, brought: bytearray | KVTransferError | None = None
    ) -> None:
        if isinstance(brought, KVTransferError):
            raise brought
        answers = self._engine.add_request(
            request, self._sink(number, request.sampling_params.n), brought
        )
        self._answers[number] = answers

    def _call(self, call: UtilityCall) -> None:
        done = self._perform(call)
        if isinstance(done, EmbeddingJob):
            self._embedding[call.call_id] = done
        else:
            self._send(done)

    def _change(self, call: UtilityCall) -> None:
        """Change the engine; what may have broken off in its midst is told, and raised."""
        try:
            self._call(call)
        except MeshwrightError as error:
            self._send(to_rejection_message(call.call_id, error))
            if isinstance(error, PartialUpdateError):
                raise
        except Exception as error:
            self._send(_failed(call.call_id, error))
            raise

    def _cancel(self, number: int) -> None:
        if number in self._fetching:
            self._fetched(number)
        self._leave(number)
        self._engine.abort(self._answers.pop(number, []))

    def _embed(self) -> bool:
        """Go on with the prompts to embed that came first; tell whether there were any."""
        if not self._embedding:
            return False
        number, vectors = next(iter(self._embedding.items()))

        def go_on() -> None:
            if vectors.run_step():
                self._leave(number)
                self._send(UtilityResult(number, vectors.embeddings))

        if self._engine.runner.tensor_parallel_size > 1:
            # Where one of them fails nobody knows what the others wait for.
            go_on()
        elif not self._try(number, go_on):
            self._leave(number)
        return True

    def _leave(self, number: int) -> None:
        """Embed the prompts of a call no further."""
        if (vectors := self._embedding.pop(number, None)) is not None:
            vectors.cancel()

    def _sink(self, number: int, choices: int) -> Callable[[RequestOutput], None]:
        left = choices
        parts: dict[int, list[RequestOutput]] = {}

        def sink(output: RequestOutput) -> None:
            nonlocal left
            if self._whole:
                parts.setdefault(output.index, []).append(output)
                if output.finish_reason is None:
                    return
                output = merge_outputs(parts.pop(output.index))
            self._ready.append((number, output))
            if output.finish_reason is not None:
                left -= 1
                if not left:
                    self._answers.pop(number, None)

        return sink


def _lower_priority() -> None:
    """Let a thread give way to those that make steps, where threads have priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), GRAMMAR_NICENESS)


def _failed(number: int, error: Exception) -> RequestRejected:
    """Return as a message what nobody foresaw."""
    # It may go on to whoever asked a server, whom details are no business of.
    told = f"internal engine error ({type(error).__name__}), see the engine log"
    return RequestRejected(number, [], engine_error=told)


def to_rejection_message(number: int, error: MeshwrightError) -> RequestRejected:
    """Return an error as a message."""
    if isinstance(error, PartialUpdateError | UpdateRejectedError):
        return RequestRejected(number, [], engine_error=str(error))
    problems = getattr(error, "problems", None) or (Problem("engine", str(error), ""),)
    told = [(each.where, each.what, each.fix) for each in problems]
    return RequestRejected(number, told, str(error) if isinstance(error, KVTransferError) else "")


def create_utility_handler(lifecycle: EngineLifecycle) -> UtilityHandler:
    """Return what performs the calls of a server."""

    def perform(call: UtilityCall) -> UtilityResult | EmbeddingJob:
        match call.method:
            case "embed":
                return lifecycle.start_embedding(call.prompts, adapter=call.lora_name)
            case "sleep":
                lifecycle.sleep(call.level)
            case "wake":
                lifecycle.wake_up(call.memory_tags)
            case "update_weights":
                lifecycle.update_weights(call.path)
            case _:
                what = f"an engine cannot {call.method}"
                raise InputError([Problem("call", what, "update both sides")])
        return UtilityResult(call.call_id)

    return perform
