"""`RoutedEngineClient`: serves with several engine replicas behind one router.

`HealthMonitor` ends the requests of engines that live but are unhealthy, as their death would; the
router then sends each to another engine, once. `PrefillDecodeStream` reads a request whose prompt
one engine computes and that another one decodes.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.serving.block_pool import compute_cache_salt, hash_blocks
from meshwright.policy.serving.router import RequestRouter, RoutingPolicy
from meshwright.run.serve.client.output_stream import OutputStream
from meshwright.run.serve.client.replica_group import ReplicaGroup
from meshwright.run.serve.engine_client import (
    MEMORY_TAGS,
    AbortableEngine,
    EngineClient,
    EngineDeadError,
    MemoryTag,
)
from meshwright.run.serve.engine_stats import EngineStats, sum_counters
from meshwright.run.serve.kv_transfer.handle import KVTransferError
from meshwright.run.serve.request import Request, RequestOutput

HEALTH_CHECK_INTERVAL_S = 1.0
"""How often it looks."""


class HealthMonitor:
    """Looks at the engines of a router while they have requests."""

    def __init__(self, engines: Sequence[EngineClient], under_way: Sequence[int]) -> None:
        """Look at engines; `under_way` says at each moment how many requests each of them has."""
        self._engines, self._under_way = engines, under_way
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look until nothing is under way; nothing happens where somebody looks already."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    def stop(self) -> None:
        """Look no further."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        seen: set[int] = set()
        while any(self._under_way):
            await asyncio.sleep(HEALTH_CHECK_INTERVAL_S)
            unhealthy = {
                number: why
                for number, engine in enumerate(self._engines)
                if self._under_way[number] and (why := engine.health_problem())
            }
            # Seen twice: where this process itself stood still, an engine may have spoken meanwhile
            # and only not been heard yet.
            for number in seen & unhealthy.keys():
                engine = self._engines[number]
                if isinstance(engine, AbortableEngine):
                    engine.abort_all(unhealthy[number])
            seen = set(unhealthy)


_Sent = tuple[AsyncIterator[RequestOutput], Callable[[], object]]
"""The pieces of an engine, and what is called when no more of them are read."""


class _Changed:
    """What a router hands on to all of its engines."""

    _together: ReplicaGroup

    async def sleep(self, level: int) -> None:
        """Let all engines give memory back; level 1 keeps the weights in host memory."""
        await self._together.sleep(level)

    async def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Let all engines take the memory of some parts again."""
        await self._together.wake_up(parts)

    def is_sleeping(self) -> bool:
        """Tell whether any of them sleeps."""
        return self._together.is_sleeping()

    def sleep_level(self) -> int:
        """Return how deep the deepest of them sleeps."""
        return self._together.sleep_level()

    async def update_weights(self, path: str) -> None:
        """Let all engines read the weights of a folder in place of the present ones."""
        await self._together.update_weights(path)


class RoutedEngineClient(_Changed):
    """Serves with one of several engines."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        how: RoutingPolicy = "prefix",
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
        self.router = RequestRouter(
            len(self.engines), how, block_tokens=block_tokens, kept_blocks=kept_blocks
        )
        self.max_model_len = min(engine.max_model_len for engine in self.engines)
        self.max_embed_len = min(engine.max_embed_len for engine in self.engines)
        self._lookout = HealthMonitor(self.engines, self.router.open_requests)
        self._together = ReplicaGroup(self.engines, lambda: any(self.router.open_requests), weights)

    def generate(self, request: Request) -> "ForwardedStream":
        """Answer; closing what is returned cancels what is left.

        Where the engine dies or is stuck before the first piece, another one answers: once, for an
        ask may be what it died of.
        """
        number = self._send(request)
        return ForwardedStream(
            *self._sent(request, number), again=lambda: self._again(request, number)
        )

    def _sent(self, request: Request, number: int) -> _Sent:
        done = partial(self.router.release, number, len(request.prompt_token_ids))
        return self.engines[number].generate(request), done

    def _again(self, request: Request, number: int) -> _Sent | None:
        """Send a request to another engine where its own is unhealthy, and not all are."""
        if not self.engines[number].health_problem() or self.health_problem():
            return None
        return self._sent(request, self._send(request))

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt."""
        ask = Request(prompt_token_ids=tuple(prompts[0]))
        number = self._send(ask)
        try:
            return await self._embedded(number, prompts, adapter)
        except EngineDeadError:
            if not self.engines[number].health_problem() or self.health_problem():
                raise
            return await self._embedded(self._send(ask), prompts, adapter)

    async def _embedded(
        self, number: int, prompts: Sequence[tuple[int, ...]], adapter: str | None
    ) -> list[list[float]]:
        try:
            return await self.engines[number].embed(prompts, adapter=adapter)
        finally:
            self.router.release(number, len(prompts[0]))

    def stats(self) -> EngineStats:
        """Return what all of them do together."""
        return combine_stats(self.engines)

    def health_problem(self) -> str:
        """Say what is wrong where no engine is healthy."""
        if changing := self._together.health_problem():
            return changing
        found = [engine.health_problem() for engine in self.engines]
        return "" if not all(found) else "; ".join(found)

    async def close(self) -> None:
        """Let go of all of them at once: each that is stuck takes seconds to end."""
        self._lookout.stop()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _send(self, request: Request) -> int:
        unavailable = frozenset(
            n for n, engine in enumerate(self.engines) if engine.health_problem()
        )
        if len(unavailable) == len(self.engines) or self._together.health_problem():
            raise EngineDeadError(self.health_problem())
        block_hashes = hash_blocks(
            request.prompt_token_ids, self._block, salt=compute_cache_salt(0, request.lora_name)
        )
        number = self.router.assign(
            len(request.prompt_token_ids), block_hashes, unavailable=unavailable
        )
        self._lookout.start()
        return number


class ForwardedStream:
    """The pieces of an engine, passed on; `done` is called once, when no more are read."""

    def __init__(
        self,
        outputs: AsyncIterator[RequestOutput],
        done: Callable[[], object],
        *,
        again: Callable[[], _Sent | None] | None = None,
    ) -> None:
        """Pass pieces on; `again` is asked once for others where the engine breaks before any."""
        self._pieces, self._done, self._again = outputs, done, again
        self._over = False

    def __aiter__(self) -> "ForwardedStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next piece."""
        try:
            piece = await anext(self._pieces)
        except EngineDeadError:
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

    def take_available(self) -> Sequence[RequestOutput]:
        """Return the pieces that nobody has to wait for."""
        return (
            self._pieces.take_available()
            if isinstance(self._pieces, OutputStream | PrefillDecodeStream)
            else ()
        )

    async def aclose(self) -> None:
        """Read no further."""
        self._end()
        if isinstance(self._pieces, OutputStream | PrefillDecodeStream | AsyncGenerator):
            await self._pieces.aclose()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._done()


class PrefillDecodeStream:
    """The pieces of an answer whose prompt one engine computes, and that another one writes."""

    def __init__(
        self,
        request: Request,
        prefill_engines: RoutedEngineClient | None,
        decode_engines: RoutedEngineClient,
    ) -> None:
        """Begin with the prefill; without its engines, those of the decoding do all."""
        self._ask, self._prefill, self._decode = request, prefill_engines, decode_engines
        self._pieces: ForwardedStream | None = None
        self._begun = self._closed = False

    def __aiter__(self) -> "PrefillDecodeStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next piece."""
        if not self._begun:
            self._begun = True
            ask = self._ask
            brought = ask if self._prefill is None else await self._handed(ask, self._prefill)
            if self._closed:
                raise StopAsyncIteration
            self._pieces = self._decode.generate(brought)
            try:
                return await anext(self._pieces)
            except KVTransferError:
                self._pieces = self._decode.generate(ask)
        assert self._pieces is not None, "who begins sets them"
        return await anext(self._pieces)

    async def _handed(self, request: Request, engines: RoutedEngineClient) -> Request:
        """Return the request with what a prefill engine computed, or as it was on failure."""
        brought = request
        try:
            self._pieces = engines.generate(msgspec.structs.replace(request, do_remote_decode=True))
            async for piece in self._pieces:
                if piece.kv_handle is not None:
                    brought = msgspec.structs.replace(request, remote_kv=piece.kv_handle)
        except EngineDeadError:
            return request
        return brought

    def take_available(self) -> Sequence[RequestOutput]:
        """Return the pieces that nobody has to wait for."""
        return () if self._pieces is None else self._pieces.take_available()

    async def aclose(self) -> None:
        """Read no further."""
        self._closed = True
        if self._pieces is not None:
            await self._pieces.aclose()


def combine_stats(engines: Sequence[EngineClient]) -> EngineStats:
    """Return what several engines do together, and how many of them are healthy."""
    gauges = [engine.stats() for engine in engines]
    now = {name: sum(getattr(each, name) for each in gauges) for name in ("running", "waiting")}
    idle = [each.since_last_step_s for each in gauges if each.since_last_step_s is not None]
    there = next((each for each in gauges if each.num_gpu_blocks), EngineStats())
    return EngineStats(
        engines=len(engines),
        healthy_engines=sum(not engine.health_problem() for engine in engines),
        kv_cache_usage=sum(each.kv_cache_usage for each in gauges) / len(gauges),
        since_last_step_s=max(idle, default=None),
        num_gpu_blocks=sum(each.num_gpu_blocks for each in gauges),
        block_size=there.block_size,
        enable_prefix_caching=there.enable_prefix_caching,
        running_adapters=_all(each.running_adapters for each in gauges),
        waiting_adapters=_all(each.waiting_adapters for each in gauges),
        **now,
        **sum_counters(gauges),
    )


def _all(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for each in names for name in each}))
