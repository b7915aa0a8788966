"""Several engines as one: `Routed` picks one for each ask, `HandedOver` one for each half of it.

Which engine gets an ask is decided by `policy/routing`, the same that the simulator drives. One
that is ill gets none until it is well; where a prompt's keys and values are lost on their way, the
engine that was to go on computes it anew.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.kv import block_keys
from meshwright.policy.routing import Router, Routing
from meshwright.run.serve.asked import Ask, Gauges, Piece
from meshwright.run.serve.interface import EngineBroken, Serves
from meshwright.run.serve.parcels import ParcelLost

_SUMMED = tuple(
    field for field in Gauges.__struct_fields__ if field not in {"kv_usage", "idle_s", "more"}
)


class Routed:
    """Serves with one of several engines."""

    def __init__(
        self, engines: Sequence[Serves], how: Routing = "prefix", *, block_tokens: int = 16
    ) -> None:
        """Serve with engines of the same model."""
        if not engines:
            raise InputError([Problem("engines", "there are none", "give one at least")])
        self.engines, self._block = list(engines), block_tokens
        self.router = Router(len(self.engines), how, block_tokens=block_tokens)
        self.max_length = min(engine.max_length for engine in self.engines)

    async def answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Answer; closing the iterator cancels what is left."""
        number, tokens = self._send(ask), len(ask.prompt)
        try:
            async with aclosing(_closable(self.engines[number].answer(ask))) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.router.back(number, tokens)

    async def embed(self, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        number = self._send(Ask(prompt=tuple(prompts[0])))
        try:
            return await self.engines[number].embed(prompts)
        finally:
            self.router.back(number, len(prompts[0]))

    def gauges(self) -> Gauges:
        """Return what all of them do together."""
        return joined([engine.gauges() for engine in self.engines])

    def ill(self) -> str:
        """Say what is wrong where no engine is well."""
        found = [engine.ill() for engine in self.engines]
        return "" if not all(found) else "; ".join(found)

    async def close(self) -> None:
        """Let go of all of them."""
        for engine in self.engines:
            await engine.close()

    def _send(self, ask: Ask) -> int:
        away = frozenset(n for n, engine in enumerate(self.engines) if engine.ill())
        if len(away) == len(self.engines):
            raise EngineBroken(self.ill())
        salt = b"" if ask.adapter is None else ask.adapter.encode()[:64]
        keys = block_keys(ask.prompt, self._block, salt=salt)
        return self.router.send(len(ask.prompt), keys, away=away)


class HandedOver:
    """Serves with engines that compute prompts and others that write the answers."""

    def __init__(
        self,
        first: Sequence[Serves],
        then: Sequence[Serves],
        how: Routing = "prefix",
        *,
        block_tokens: int = 16,
    ) -> None:
        """Let `first` compute prompts, and `then` go on with them."""
        self._first = Routed(first, how, block_tokens=block_tokens)
        self._then = Routed(then, "least-loaded", block_tokens=block_tokens)
        self.max_length = min(self._first.max_length, self._then.max_length)

    async def answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Answer; closing the iterator cancels what is left."""
        brought = ask
        # Several answers to one prompt share its blocks only where it is computed.
        if ask.sampling.n == 1 and not self._first.ill():
            async with aclosing(
                self._first.answer(msgspec.structs.replace(ask, hands_over=True))
            ) as pieces:
                async for piece in pieces:
                    if piece.parcel is not None:
                        brought = msgspec.structs.replace(ask, brought=piece.parcel)
        try:
            async with aclosing(self._then.answer(brought)) as rest:
                async for piece in rest:
                    yield piece
        except ParcelLost:
            async with aclosing(self._then.answer(ask)) as anew:
                async for piece in anew:
                    yield piece

    async def embed(self, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        return await self._first.embed(prompts)

    def gauges(self) -> Gauges:
        """Return what all of them do together."""
        return joined([self._first.gauges(), self._then.gauges()])

    def ill(self) -> str:
        """Say what is wrong where no engine can write answers."""
        return self._then.ill()

    async def close(self) -> None:
        """Let go of all of them."""
        await self._first.close()
        await self._then.close()


def _closable(pieces: AsyncIterator[Piece]) -> AsyncGenerator[Piece, None]:
    """Take an engine's pieces for what they are: a generator that can be closed."""
    assert isinstance(pieces, AsyncGenerator)
    return pieces


def joined(gauges: Sequence[Gauges]) -> Gauges:
    """Return the gauges of several engines as of one."""
    sums = {name: sum(getattr(each, name) for each in gauges) for name in _SUMMED}
    idle = [each.idle_s for each in gauges if each.idle_s is not None]
    usage = sum(each.kv_usage for each in gauges) / len(gauges)
    return Gauges(kv_usage=usage, idle_s=max(idle, default=None), **sums)
