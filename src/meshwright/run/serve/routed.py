"""Several engines as one: `Routed` picks one for each ask, `HandedOver` one for each half of it.

Which engine gets an ask is decided by `policy/routing`, the same that the simulator drives. One
that is ill gets none until it is well, and what it had not begun goes to another one, also where it
lives and is stuck (`Lookout`). Where a prompt's keys and values are lost on their way, the engine
that was to go on computes it anew. All of them sleep, wake and take new weights together.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.kv import block_keys, salt_of
from meshwright.policy.routing import Router, Routing
from meshwright.run.serve.asked import Ask, Gauges, Piece, counted
from meshwright.run.serve.inbox import Inbox
from meshwright.run.serve.interface import MEMORY, EngineBroken, Memory, Serves
from meshwright.run.serve.lookout import Lookout
from meshwright.run.serve.parcels import ParcelLost
from meshwright.run.serve.together import Together

_Sent = tuple[AsyncIterator[Piece], Callable[[], object]]
"""The pieces of an engine, and what is called when no more of them are read."""


class _Changed:
    """What a router hands on to all of its engines."""

    _together: Together

    async def sleep(self, level: int) -> None:
        """Let all engines give memory back; level 1 keeps the weights in host memory."""
        await self._together.sleep(level)

    async def wake(self, parts: Collection[Memory] = MEMORY) -> None:
        """Let all engines take the memory of some parts again."""
        await self._together.wake(parts)

    def asleep(self) -> bool:
        """Tell whether any of them sleeps."""
        return self._together.asleep()

    def sleep_level(self) -> int:
        """Return how deep the deepest of them sleeps."""
        return self._together.sleep_level()

    async def update_weights(self, path: str) -> None:
        """Let all engines read the weights of a folder in place of the present ones."""
        await self._together.update_weights(path)


class Routed(_Changed):
    """Serves with one of several engines."""

    def __init__(
        self,
        engines: Sequence[Serves],
        how: Routing = "prefix",
        *,
        block_tokens: int = 16,
        kept_blocks: int = 1 << 20,
        weights: str = "",
    ) -> None:
        """Serve with engines of the same model; `weights` is the folder they were read from.

        `kept_blocks` is how many blocks an engine's cache has: what was sent there before the last
        so many is no longer there.
        """
        if not engines:
            raise InputError([Problem("engines", "there are none", "give one at least")])
        self.engines, self._block = list(engines), block_tokens
        self.router = Router(
            len(self.engines), how, block_tokens=block_tokens, kept_blocks=kept_blocks
        )
        self.max_length = min(engine.max_length for engine in self.engines)
        self.embed_length = min(engine.embed_length for engine in self.engines)
        self._lookout = Lookout(self.engines, self.router.open)
        self._together = Together(self.engines, lambda: any(self.router.open), weights)

    def answer(self, ask: Ask) -> "Passed":
        """Answer; closing what is returned cancels what is left.

        Where the engine dies or is stuck before the first piece, another one answers: once, for an
        ask may be what it died of.
        """
        number = self._send(ask)
        return Passed(*self._sent(ask, number), again=lambda: self._again(ask, number))

    def _sent(self, ask: Ask, number: int) -> _Sent:
        done = partial(self.router.back, number, len(ask.prompt))
        return self.engines[number].answer(ask), done

    def _again(self, ask: Ask, number: int) -> _Sent | None:
        """Send an ask to another engine where the one that it went to is ill, and not all are."""
        if not self.engines[number].ill() or self.ill():
            return None
        return self._sent(ask, self._send(ask))

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        ask = Ask(prompt=tuple(prompts[0]))
        number = self._send(ask)
        try:
            return await self._embedded(number, prompts, adapter)
        except EngineBroken:
            if not self.engines[number].ill() or self.ill():
                raise
            return await self._embedded(self._send(ask), prompts, adapter)

    async def _embedded(
        self, number: int, prompts: Sequence[tuple[int, ...]], adapter: str | None
    ) -> list[list[float]]:
        try:
            return await self.engines[number].embed(prompts, adapter=adapter)
        finally:
            self.router.back(number, len(prompts[0]))

    def gauges(self) -> Gauges:
        """Return what all of them do together."""
        return gauges_of(self.engines)

    def ill(self) -> str:
        """Say what is wrong where no engine is well."""
        if changing := self._together.ill():
            return changing
        found = [engine.ill() for engine in self.engines]
        return "" if not all(found) else "; ".join(found)

    async def close(self) -> None:
        """Let go of all of them at once: each that is stuck takes seconds to end."""
        self._lookout.end()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _send(self, ask: Ask) -> int:
        away = frozenset(n for n, engine in enumerate(self.engines) if engine.ill())
        if len(away) == len(self.engines) or self._together.ill():
            raise EngineBroken(self.ill())
        keys = block_keys(ask.prompt, self._block, salt=salt_of(0, ask.adapter))
        number = self.router.send(len(ask.prompt), keys, away=away)
        self._lookout.begin()
        return number


class HandedOver(_Changed):
    """Serves with engines that compute prompts and others that write the answers."""

    def __init__(
        self,
        first: Sequence[Serves],
        then: Sequence[Serves],
        how: Routing = "prefix",
        *,
        block_tokens: int = 16,
        kept_blocks: int = 1 << 20,
        weights: str = "",
    ) -> None:
        """Let `first` compute prompts and `then` go on with them; `weights` is their folder."""
        self._first = Routed(first, how, block_tokens=block_tokens, kept_blocks=kept_blocks)
        self._then = Routed(then, "least-loaded", block_tokens=block_tokens)
        self.max_length = min(self._first.max_length, self._then.max_length)
        self.embed_length = min(self._first.embed_length, self._then.embed_length)
        self._open = 0
        """Asks that have not come to their end, also those that are between the two."""
        self._together = Together([*first, *then], self._busy, weights)

    def answer(self, ask: Ask) -> "Passed":
        """Answer; closing what is returned cancels what is left."""
        if changing := self._together.ill():
            raise EngineBroken(changing)
        # Several answers to one prompt share its blocks only where it is computed, and a parcel
        # does not tell how likely the prompt's tokens were.
        alone = ask.sampling.n > 1 or ask.prompt_logprobs is not None
        split = not alone and not self._first.ill()
        self._open += 1
        return Passed(Halves(ask, self._first if split else None, self._then), self._back)

    def _back(self) -> None:
        self._open -= 1

    def _busy(self) -> bool:
        return bool(self._open) or any((*self._first.router.open, *self._then.router.open))

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        where = self._then if self._first.ill() else self._first
        return await where.embed(prompts, adapter=adapter)

    def gauges(self) -> Gauges:
        """Return what all of them do together."""
        return gauges_of([*self._first.engines, *self._then.engines])

    def ill(self) -> str:
        """Say what is wrong where no engine can write answers."""
        return self._together.ill() or self._then.ill()

    async def close(self) -> None:
        """Let go of all of them."""
        await asyncio.gather(self._first.close(), self._then.close())


class Passed:
    """The pieces of an engine, passed on; `done` is called once, when no more are read."""

    def __init__(
        self,
        pieces: AsyncIterator[Piece],
        done: Callable[[], object],
        *,
        again: Callable[[], _Sent | None] | None = None,
    ) -> None:
        """Pass pieces on; `again` is asked once for others where the engine breaks before any."""
        self._pieces, self._done, self._again = pieces, done, again
        self._over = False

    def __aiter__(self) -> "Passed":
        return self

    async def __anext__(self) -> Piece:
        """Return the next piece."""
        try:
            piece = await anext(self._pieces)
        except EngineBroken:
            if not self._resent():
                self._end()
                raise
            return await anext(self)
        # Nobody asks further after an end or an error; a reader that is cancelled closes.
        except (StopAsyncIteration, MeshwrightError):
            self._end()
            raise
        self._again = None
        return piece

    def _resent(self) -> bool:
        """Begin anew elsewhere, where nothing has come yet and there is such a place."""
        again, self._again = self._again, None
        if self._over or again is None or (found := again()) is None:
            return False
        self._done()
        self._pieces, self._done = found
        return True

    def ready(self) -> Sequence[Piece]:
        """Return the pieces that nobody has to wait for."""
        return self._pieces.ready() if isinstance(self._pieces, Inbox | Halves) else ()

    async def aclose(self) -> None:
        """Read no further."""
        self._end()
        if isinstance(self._pieces, Inbox | Halves | AsyncGenerator):
            await self._pieces.aclose()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._done()


class Halves:
    """The pieces of an answer whose prompt one engine computes, and that another one writes."""

    def __init__(self, ask: Ask, first: Routed | None, then: Routed) -> None:
        """Begin with the first half; without one, the second engine does all."""
        self._ask, self._first, self._then = ask, first, then
        self._pieces: Passed | None = None
        self._begun = self._closed = False

    def __aiter__(self) -> "Halves":
        return self

    async def __anext__(self) -> Piece:
        """Return the next piece."""
        if not self._begun:
            self._begun = True
            ask = self._ask
            brought = ask if self._first is None else await self._handed(ask, self._first)
            if self._closed:
                raise StopAsyncIteration
            self._pieces = self._then.answer(brought)
            try:
                return await anext(self._pieces)
            except ParcelLost:
                self._pieces = self._then.answer(ask)
        assert self._pieces is not None, "who begins sets them"
        return await anext(self._pieces)

    async def _handed(self, ask: Ask, first: Routed) -> Ask:
        """Return the ask with what the first engine computed, or as it was where that failed."""
        brought = ask
        try:
            self._pieces = first.answer(msgspec.structs.replace(ask, hands_over=True))
            async for piece in self._pieces:
                if piece.parcel is not None:
                    brought = msgspec.structs.replace(ask, brought=piece.parcel)
        except EngineBroken:
            return ask
        return brought

    def ready(self) -> Sequence[Piece]:
        """Return the pieces that nobody has to wait for."""
        return () if self._pieces is None else self._pieces.ready()

    async def aclose(self) -> None:
        """Read no further."""
        self._closed = True
        if self._pieces is not None:
            await self._pieces.aclose()


def gauges_of(engines: Sequence[Serves]) -> Gauges:
    """Return what several engines do together, and how many of them are well."""
    gauges = [engine.gauges() for engine in engines]
    now = {name: sum(getattr(each, name) for each in gauges) for name in ("running", "waiting")}
    idle = [each.idle_s for each in gauges if each.idle_s is not None]
    there = next((each for each in gauges if each.blocks), Gauges())
    return Gauges(
        engines=len(engines),
        well=sum(not engine.ill() for engine in engines),
        kv_usage=sum(each.kv_usage for each in gauges) / len(gauges),
        idle_s=max(idle, default=None),
        blocks=sum(each.blocks for each in gauges),
        block_tokens=there.block_tokens,
        prefix_cache=there.prefix_cache,
        running_adapters=_all(each.running_adapters for each in gauges),
        waiting_adapters=_all(each.waiting_adapters for each in gauges),
        **now,
        **counted(gauges),
    )


def _all(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for each in names for name in each}))
