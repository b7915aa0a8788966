"""`Caller`: the side of a worker that asks: answers and calls under way, by their numbers.

Who inherits it carries messages to a `Worker`, hands over what that says, and ends everything with
an error where the worker is gone.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

from meshwright.errors import InputError, Problem
from meshwright.run.serve.asked import Ask
from meshwright.run.serve.inbox import Inbox
from meshwright.run.serve.interface import MEMORY, EngineBroken, Memory
from meshwright.run.serve.parcels import ParcelLost
from meshwright.run.serve.worker.frames import (
    Answered,
    Asked,
    Call,
    Cancel,
    Done,
    FromWorker,
    Refused,
    ToWorker,
)


class Caller:
    """Asks an engine by messages, for one event loop."""

    def __init__(self) -> None:
        self._open: dict[int, Inbox] = {}
        self._calls: dict[int, asyncio.Future[Done]] = {}
        self._embeds: set[int] = set()
        """Calls for vectors, of all that are under way."""
        self._number = 0
        self._level = 0
        """How deep it sleeps, where it does."""

    def answer(self, ask: Ask) -> Inbox:
        """Answer; closing what is returned cancels what is left."""
        number = self._next_number()

        def give_up() -> None:
            if self._open.pop(number, None) is not None:
                self._send(Cancel(number))

        inbox = Inbox(ask.sampling.n, give_up)
        try:
            self._require("answer")
        except EngineBroken as error:
            inbox.refuse(error)
            return inbox
        self._open[number] = inbox
        self._send(Asked(number, ask))
        return inbox

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        number = self._next_number()
        self._embeds.add(number)
        try:
            done = await self._call(Call(number, "embed", prompts=list(prompts), adapter=adapter))
        finally:
            self._embeds.discard(number)
        return done.vectors

    def let_go(self, why: str) -> None:
        """End answers and vectors under way with an error, and cancel them where they are."""
        # Changes stay: they have a deadline of their own, and cannot be given up in their midst.
        under_way, self._open = self._open, {}
        for number, inbox in under_way.items():
            self._send(Cancel(number))
            inbox.refuse(EngineBroken(why))
        for number in [number for number in self._embeds if number in self._calls]:
            self._send(Cancel(number))
            self._settle(number, lambda call: call.set_exception(EngineBroken(why)))

    async def sleep(self, level: int) -> None:
        """Give memory back; level 1 keeps the weights in host memory."""
        before = self.sleep_level()
        await self._call(Call(self._next_number(), "sleep", level=level))
        self._level = max(before, level, 1)  # with 0 its cache alone sleeps

    async def wake(self, parts: Collection[Memory] = MEMORY) -> None:
        """Take the memory of some parts again."""
        await self._call(Call(self._next_number(), "wake", parts=tuple(parts)))
        if "weights" in parts:
            self._level = 1

    def asleep(self) -> bool:
        """Tell whether any part of it sleeps."""
        raise NotImplementedError

    def sleep_level(self) -> int:
        """Return how deep it sleeps: 0 not at all, 2 where its weights are nowhere, else 1."""
        return self._level if self.asleep() else 0

    async def update_weights(self, path: str) -> None:
        """Read the weights of a folder in place of the present ones."""
        await self._call(Call(self._next_number(), "update_weights", path=path))

    def _send(self, message: ToWorker) -> None:
        """Send a message to the worker."""
        raise NotImplementedError

    def _require(self, what: str, /) -> None:
        """Raise `EngineBroken` where the worker cannot do a thing at the moment."""
        raise NotImplementedError

    def _hear(self, message: FromWorker) -> None:
        """Take what the worker says."""
        match message:
            case Answered(pieces):
                for number, piece in pieces:
                    if (inbox := self._open.get(number)) is not None:
                        inbox.put(piece)
                        if inbox.whole:
                            del self._open[number]
            case Done(number):
                self._settle(number, lambda call: call.set_result(message))
            case Refused(number):
                error = _error_of(message)
                if (inbox := self._open.pop(number, None)) is not None:
                    inbox.refuse(error)
                self._settle(number, lambda call: call.set_exception(error))

    def _fail(self, why: str) -> None:
        """End everything under way with an error."""
        under_way, self._open = self._open, {}
        for inbox in under_way.values():
            if inbox.begun:
                inbox.break_off(why)
            else:
                # Nobody has seen anything of it: another engine may answer.
                inbox.refuse(EngineBroken(why))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(EngineBroken(why))

    async def _call(self, call: Call) -> Done:
        self._require(call.what)
        try:
            return await self._settled(call, self._begun(call))
        except asyncio.CancelledError:
            if self._calls.pop(call.number, None) is not None:
                self._send(Cancel(call.number))
            raise

    async def _settled(self, call: Call, done: "asyncio.Future[Done]") -> Done:
        """Wait for the end of a call that was sent."""
        del call
        return await done

    def _begun(self, call: Call) -> "asyncio.Future[Done]":
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._calls[call.number] = done
        self._send(call)
        return done

    def _settle(self, number: int, how: Callable[["asyncio.Future[Done]"], None]) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            how(call)

    def _next_number(self) -> int:
        self._number += 1
        return self._number


def _error_of(said: Refused) -> Exception:
    if said.lost:
        return ParcelLost(said.lost)
    if said.failed:
        return EngineBroken(said.failed)
    return InputError([Problem(*each) for each in said.problems])
