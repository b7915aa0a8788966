"""`MessageEngineClient`: client of an engine worker: outputs and pending calls by number.

Who inherits it carries messages to an `EngineWorker`, hands over what that says, and ends
everything with an error where the worker is gone.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

from meshwright.errors import InputError, Problem
from meshwright.run.serve.client.output_stream import OutputStream
from meshwright.run.serve.engine_client import MEMORY_TAGS, EngineDeadError, MemoryTag
from meshwright.run.serve.kv_transfer.handle import KVTransferError
from meshwright.run.serve.request import Request
from meshwright.run.serve.worker.protocol import (
    AbortRequest,
    AddRequest,
    EngineMessage,
    EngineOutputs,
    RequestRejected,
    UtilityCall,
    UtilityResult,
    WorkerMessage,
)


class MessageEngineClient:
    """Asks an engine by messages, for one event loop."""

    def __init__(self) -> None:
        self._open: dict[int, OutputStream] = {}
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._embeds: set[int] = set()
        """Calls for vectors, of all that are under way."""
        self._number = 0
        self._level = 0
        """How deep it sleeps, where it does."""

    def generate(self, request: Request) -> OutputStream:
        """Answer; closing what is returned cancels what is left."""
        number = self._next_number()

        def give_up() -> None:
            if self._open.pop(number, None) is not None:
                self._send(AbortRequest(number))

        inbox = OutputStream(request.sampling_params.n, give_up)
        try:
            self._require_ready("answer")
        except EngineDeadError as error:
            inbox.fail(error)
            return inbox
        self._open[number] = inbox
        self._send(AddRequest(number, request))
        return inbox

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        number = self._next_number()
        self._embeds.add(number)
        try:
            done = await self._call(
                UtilityCall(number, "embed", prompts=list(prompts), lora_name=adapter)
            )
        finally:
            self._embeds.discard(number)
        return done.embeddings

    def abort_all(self, why: str) -> None:
        """End answers and vectors under way with an error, and cancel them where they are."""
        # Changes stay: they have a deadline of their own, and cannot be given up in their midst.
        under_way, self._open = self._open, {}
        for number, inbox in under_way.items():
            self._send(AbortRequest(number))
            inbox.fail(EngineDeadError(why))
        for number in [number for number in self._embeds if number in self._calls]:
            self._send(AbortRequest(number))
            self._resolve_call(number, lambda call: call.set_exception(EngineDeadError(why)))

    async def sleep(self, level: int) -> None:
        """Give memory back; level 1 keeps the weights in host memory."""
        before = self.sleep_level()
        await self._call(UtilityCall(self._next_number(), "sleep", level=level))
        self._level = max(before, level, 1)  # with 0 its cache alone sleeps

    async def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Take the memory of some parts again."""
        await self._call(UtilityCall(self._next_number(), "wake", memory_tags=tuple(parts)))
        if "weights" in parts:
            self._level = 1

    def is_sleeping(self) -> bool:
        """Tell whether any part of it sleeps."""
        raise NotImplementedError

    def sleep_level(self) -> int:
        """Return how deep it sleeps: 0 not at all, 2 where its weights are nowhere, else 1."""
        return self._level if self.is_sleeping() else 0

    async def update_weights(self, path: str) -> None:
        """Read the weights of a folder in place of the present ones."""
        await self._call(UtilityCall(self._next_number(), "update_weights", path=path))

    def _send(self, message: WorkerMessage) -> None:
        """Send a message to the worker."""
        raise NotImplementedError

    def _require_ready(self, what: str, /) -> None:
        """Raise `EngineDeadError` where the worker cannot do a thing at the moment."""
        raise NotImplementedError

    def _dispatch(self, message: EngineMessage) -> None:
        """Take what the worker says."""
        match message:
            case EngineOutputs(pieces):
                for number, piece in pieces:
                    if (inbox := self._open.get(number)) is not None:
                        inbox.put(piece)
                        if inbox.is_finished:
                            del self._open[number]
            case UtilityResult(number):
                self._resolve_call(number, lambda call: call.set_result(message))
            case RequestRejected(number):
                error = _error_of(message)
                if (inbox := self._open.pop(number, None)) is not None:
                    inbox.fail(error)
                self._resolve_call(number, lambda call: call.set_exception(error))

    def _fail_all(self, why: str) -> None:
        """End everything under way with an error."""
        under_way, self._open = self._open, {}
        for inbox in under_way.values():
            # Of which nobody has seen anything, another engine may answer.
            inbox.fail(EngineDeadError(why))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(EngineDeadError(why))

    async def _call(self, call: UtilityCall) -> UtilityResult:
        self._require_ready(call.method)
        try:
            return await self._settled(call, self._begun(call))
        except asyncio.CancelledError:
            if self._calls.pop(call.call_id, None) is not None:
                self._send(AbortRequest(call.call_id))
            raise

    async def _settled(
        self, call: UtilityCall, done: "asyncio.Future[UtilityResult]"
    ) -> UtilityResult:
        """Wait for the end of a call that was sent."""
        del call
        return await done

    def _begun(self, call: UtilityCall) -> "asyncio.Future[UtilityResult]":
        done: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = done
        self._send(call)
        return done

    def _resolve_call(
        self, number: int, how: Callable[["asyncio.Future[UtilityResult]"], None]
    ) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            how(call)

    def _next_number(self) -> int:
        self._number += 1
        return self._number


def _error_of(said: RequestRejected) -> Exception:
    if said.kv_transfer_error:
        return KVTransferError(said.kv_transfer_error)
    if said.engine_error:
        return EngineDeadError(said.engine_error)
    return InputError([Problem(*each) for each in said.problems])
