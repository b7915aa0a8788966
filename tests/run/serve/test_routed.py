"""Several engines answer as one would, and one that is ill is left out."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.run.serve.asked import Ask, Gauges, Piece, Sampling
from meshwright.run.serve.engine.loop import EngineLoop
from meshwright.run.serve.interface import EngineBroken, Serves
from meshwright.run.serve.parcels import Parcel, post_of
from meshwright.run.serve.routed import HandedOver, Routed
from tests.run.serve.engine.small import engine_of
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import small

GREEDY = Sampling(temperature=0.0, max_tokens=12)


async def tokens_of(engine: Serves, ask: Ask) -> list[int]:
    return [token async for piece in engine.answer(ask) for token in piece.tokens]


async def all_of(engine: Serves, sampling: Sampling = GREEDY) -> list[list[int]]:
    asks = [Ask(prompt=prompt, sampling=sampling) for prompt in PROMPTS]
    return await asyncio.gather(*(tokens_of(engine, ask) for ask in asks))


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        return await work()

    return asyncio.run(whole())


class Ill:
    """An engine that never gets well."""

    max_length = embed_length = 64

    async def answer(self, ask: Ask, /) -> AsyncIterator[Piece]:
        if ask.prompt:
            raise EngineBroken("asked although it is ill")
        yield Piece()

    async def embed(
        self, _: Sequence[tuple[int, ...]], /, adapter: str | None = None
    ) -> list[list[float]]:
        raise EngineBroken(f"asked although it is ill, for {adapter}")

    def gauges(self) -> Gauges:
        return Gauges()

    def ill(self) -> str:
        return "it is ill"

    async def close(self) -> None:
        pass


def test_engines_behind_a_router_answer_as_one_does() -> None:
    async def work() -> None:
        engines = [EngineLoop(engine_of(small())) for _ in range(2)]
        routed = Routed([engines[0], Ill(), engines[1]], "least-loaded", block_tokens=4)
        assert await all_of(routed) == expected()
        assert all(engine.gauges().steps > 0 for engine in engines)
        assert routed.gauges().output_tokens == 12 * len(PROMPTS)
        assert routed.router.open == [0, 0, 0]
        assert routed.ill() == ""
        await routed.close()

    run(work)


def test_prompts_that_begin_alike_go_to_the_same_engine() -> None:
    async def work() -> None:
        engines = [EngineLoop(engine_of(small())) for _ in range(2)]
        routed = Routed(engines, "prefix", block_tokens=4)
        for tail in ((1, 2), (3,), (4, 5, 6)):
            await tokens_of(routed, Ask(prompt=PROMPTS[3] + tail, sampling=GREEDY))
        assert [engine.gauges().prefix_hits for engine in engines] in ([56, 0], [0, 56])
        await routed.close()

    run(work)


def test_a_router_forgets_what_no_cache_has_room_for() -> None:
    async def work() -> None:
        engines = [EngineLoop(engine_of(small())) for _ in range(2)]
        routed = Routed(engines, "prefix", block_tokens=4, kept_blocks=4)
        both = HandedOver([engines[0]], [engines[1]], block_tokens=4, kept_blocks=4)
        for first in range(0, 80, 16):
            ask = Ask(prompt=tuple(range(first, first + 16)), sampling=GREEDY)
            for router in (routed, both._first):
                router.router.back(router._send(ask), 16)
        assert [len(each) for each in routed.router._sent] == [4, 4]
        assert [len(each) for each in both._first.router._sent] == [4]
        await routed.close()

    run(work)


def test_figures_say_how_many_engines_are_well_and_how_full_they_are() -> None:
    class Full(Ill):
        def gauges(self) -> Gauges:
            return Gauges(kv_usage=1.0, running=2)

        def ill(self) -> str:
            return ""

    async def work() -> None:
        routed = Routed([Full(), Ill(), Ill()]).gauges()
        assert (routed.engines, routed.well, routed.running) == (3, 1, 2)
        both = HandedOver([Ill()], [Full(), Full(), Ill()]).gauges()
        assert (both.engines, both.well, both.kv_usage) == (4, 2, 0.5)

    run(work)


def test_engines_are_let_go_of_at_once() -> None:
    class Slow(Ill):
        async def close(self) -> None:
            closing.append(self)
            while len(closing) < 4:
                await asyncio.sleep(0)

    closing: list[Slow] = []

    async def work() -> None:
        both = HandedOver([Slow()], [Slow(), Slow(), Slow()])
        await asyncio.wait_for(both.close(), 10)
        assert len(closing) == 4

    run(work)


class Dying:
    """An engine that dies of its first ask, or of its first vectors, after some pieces."""

    max_length = embed_length = 64

    def __init__(self, pieces: int = 0) -> None:
        self._pieces, self._dead = pieces, ""

    async def answer(self, _: Ask, /) -> AsyncIterator[Piece]:
        for _piece in range(self._pieces):
            yield Piece(tokens=(7,))
        self._dead = "it died"
        raise EngineBroken(self._dead)

    async def embed(
        self, _: Sequence[tuple[int, ...]], /, adapter: str | None = None
    ) -> list[list[float]]:
        self._dead = f"it died of {adapter}"
        raise EngineBroken(self._dead)

    def gauges(self) -> Gauges:
        return Gauges()

    def ill(self) -> str:
        return self._dead

    async def close(self) -> None:
        pass


def test_what_an_engine_dies_with_before_a_token_is_answered_by_another() -> None:
    async def work() -> None:
        well = EngineLoop(engine_of(small()))
        for dying in (1, 2):
            engines: list[Serves] = [*(Dying() for _ in range(dying)), well]
            routed = Routed(engines, "round-robin")
            asks = [Ask(prompt=prompt, sampling=GREEDY) for prompt in PROMPTS]
            got = await asyncio.gather(
                *(tokens_of(routed, ask) for ask in asks), return_exceptions=True
            )
            # Once: who was with two that died may be what they died of.
            wrong = [one for one in got if isinstance(one, EngineBroken)]
            assert len(wrong) == dying - 1
            assert [one for one in got if one in expected()] == [
                one for one in got if one not in wrong
            ]
            assert routed.router.open == [0] * len(engines)
        await well.close()

    run(work)


def test_a_token_that_was_told_is_not_told_twice() -> None:
    async def work() -> None:
        well = EngineLoop(engine_of(small()))
        routed = Routed([Dying(pieces=1), well], "round-robin")
        pieces = routed.answer(Ask(prompt=PROMPTS[0], sampling=GREEDY))
        assert (await anext(pieces)).tokens == (7,)
        with pytest.raises(EngineBroken, match="it died"):
            await anext(pieces)
        assert routed.router.open == [0, 0]
        await well.close()

    run(work)


def test_vectors_that_an_engine_died_of_are_made_by_another() -> None:
    async def work() -> None:
        well = Dying()
        well.embed = one_vector  # type: ignore[method-assign]
        routed = Routed([Dying(), well], "round-robin")
        assert await routed.embed([(1,)]) == [[1.0]]
        assert routed.router.open == [0, 0]

    run(work)


async def one_vector(*_: object, **__: object) -> list[list[float]]:
    return [[1.0]]


def test_without_a_well_engine_asks_are_refused() -> None:
    async def work() -> None:
        routed = Routed([Ill(), Ill()])
        assert routed.ill() == "it is ill; it is ill"
        with pytest.raises(EngineBroken, match="it is ill"):
            await tokens_of(routed, Ask(prompt=(1,)))
        with pytest.raises(EngineBroken, match="it is ill"):
            await routed.embed([(1,)])
        assert routed.router.open == [0, 0]

    run(work)


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_answers_that_are_handed_over_are_the_same(way: Any) -> None:
    async def work() -> None:
        post = post_of(way)
        first = EngineLoop(engine_of(small(), parts={"post": post}))
        then = EngineLoop(engine_of(small()))
        both = HandedOver([first], [then], block_tokens=4)
        assert await all_of(both) == expected()
        assert first.gauges().prompt_tokens == sum(map(len, PROMPTS))
        assert then.gauges().prompt_tokens == 0
        assert await all_of(both, Sampling(temperature=0.0, max_tokens=1)) == expected(output=1)
        assert (first.gauges().kv_usage, then.gauges().kv_usage) == (0, 0)
        await both.close()

    run(work)


def test_a_seed_draws_the_same_when_it_is_handed_over() -> None:
    async def work() -> None:
        warm = Sampling(temperature=1.0, max_tokens=12, seed=11)
        alone = EngineLoop(engine_of(small()))
        wanted = await all_of(alone, warm)
        both = HandedOver([EngineLoop(engine_of(small()))], [EngineLoop(engine_of(small()))])
        assert await all_of(both, warm) == wanted
        await both.close()
        await alone.close()

    run(work)


def test_those_who_make_room_after_the_handover_compute_their_prompt_anew() -> None:
    async def work() -> None:
        then = EngineLoop(engine_of(small(), blocks=14))
        both = HandedOver([EngineLoop(engine_of(small()))], [then])
        long = Sampling(temperature=0.0, max_tokens=20)
        assert await all_of(both, long) == expected(output=20)
        assert then.gauges().preemptions > 0
        await both.close()

    run(work)


def test_what_another_kind_of_engine_computed_is_refused() -> None:
    async def work() -> None:
        engine = EngineLoop(engine_of(small()))
        parcel = Parcel(way="shm", place="nowhere", blocks=1, size=12, first=1)
        with pytest.raises(InputError, match="12 bytes for 2 blocks of 1,024"):
            await tokens_of(engine, Ask(prompt=(1, 2, 3, 4, 5), brought=parcel))
        await engine.close()

    run(work)


def test_several_answers_and_lost_halves_are_left_to_the_second_engine() -> None:
    async def work() -> None:
        then = EngineLoop(engine_of(small()))
        both = HandedOver([Ill()], [then])
        assert await all_of(both) == expected()
        await both.close()

    run(work)


def test_what_came_meanwhile_is_read_at_once_through_a_router() -> None:
    async def work() -> None:
        routed = Routed([EngineLoop(engine_of(small())) for _ in range(2)])
        both = HandedOver([EngineLoop(engine_of(small()))], [EngineLoop(engine_of(small()))])
        for engine in (routed, both):
            pieces = engine.answer(Ask(prompt=PROMPTS[1], sampling=GREEDY))
            found = [await anext(pieces)]
            while found[-1].finish is None:
                await asyncio.sleep(0.01)
                found += pieces.ready()
            assert [token for piece in found for token in piece.tokens] == expected()[1]
            await pieces.aclose()
            await engine.close()
        assert routed.router.open == [0, 0]

    run(work)


async def first_of(engine: Serves, ask: Ask) -> Piece:
    pieces = [piece async for piece in engine.answer(ask)]
    assert all(piece.queued_s is None and not piece.cached_tokens for piece in pieces[1:])
    return pieces[0]


def test_what_is_told_of_a_prompt_does_not_depend_on_where_it_is_computed() -> None:
    async def work() -> None:
        alone = EngineLoop(engine_of(small()))
        both = HandedOver([EngineLoop(engine_of(small()))], [EngineLoop(engine_of(small()))])
        for engine in (alone, both):
            ask = Ask(prompt=PROMPTS[2], sampling=GREEDY)
            pieces = [await first_of(engine, ask) for _ in range(2)]
            assert [piece.cached_tokens for piece in pieces] == [0, 16]
            assert all(piece.queued_s is not None for piece in pieces)
            await engine.close()

    run(work)


def test_answers_whose_likelihoods_are_told_are_handed_over_too() -> None:
    async def work() -> None:
        told = Sampling(temperature=0.0, max_tokens=6, logprobs=2)
        alone, first = EngineLoop(engine_of(small())), EngineLoop(engine_of(small()))
        both = HandedOver([first], [EngineLoop(engine_of(small()))])
        ask = Ask(prompt=PROMPTS[2], sampling=told)
        found = []
        for engine in (alone, both):
            likely = [each async for piece in engine.answer(ask) for each in piece.logprobs]
            found.append(
                [(each.token, *(token for token, _ in each.top), each.logprob) for each in likely]
            )
        assert len(found[0]) == 6
        assert [each[:-1] for each in found[1]] == [each[:-1] for each in found[0]]
        logprobs = [[each[-1] for each in one] for one in found]
        assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-5)
        assert first.gauges().prompt_tokens == len(PROMPTS[2])
        await alone.close()
        await both.close()

    run(work)


def test_keys_and_values_that_other_weights_made_are_computed_anew() -> None:
    async def work() -> None:
        first, then = (EngineLoop(engine_of(small())) for _ in range(2))
        first.engine.weights = "old"
        both = HandedOver([first], [then])
        assert await all_of(both) == expected()
        assert then.gauges().prompt_tokens == sum(map(len, PROMPTS))
        await both.close()

    run(work)


def test_who_reads_no_further_gives_up_either_half() -> None:
    async def work() -> None:
        first, then = (EngineLoop(engine_of(small())) for _ in range(2))
        both = HandedOver([first], [then])
        for pieces_read in (0, 2):
            pieces = both.answer(Ask(prompt=PROMPTS[1], sampling=Sampling(max_tokens=50)))
            for _ in range(pieces_read):
                await anext(pieces)
            if not pieces_read:
                reading = asyncio.ensure_future(anext(pieces))
                await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            await pieces.aclose()
            while first.gauges().running or then.gauges().running:
                await asyncio.sleep(0.01)
        assert then.gauges().output_tokens < 50
        await both.close()

    run(work)
