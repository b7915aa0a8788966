"""Several engines answer as one would, and one that is unhealthy is left out."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.run.serve.client.disaggregated_client import DisaggregatedEngineClient
from meshwright.run.serve.client.routed_client import RoutedEngineClient
from meshwright.run.serve.client.thread_client import ThreadEngineClient
from meshwright.run.serve.engine_client import EngineClient, EngineDeadError
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.kv_transfer.handle import KVTransferHandle
from meshwright.run.serve.kv_transfer.transport import create_kv_sender
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.run.serve.sampling_params import SamplingParams
from tests.run.serve.engine.small import engine_of
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import small

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


async def tokens_of(engine: EngineClient, ask: Request) -> list[int]:
    return [token async for piece in engine.generate(ask) for token in piece.token_ids]


async def all_of(engine: EngineClient, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    asks = [Request(prompt_token_ids=prompt, sampling_params=sampling) for prompt in PROMPTS]
    return await asyncio.gather(*(tokens_of(engine, ask) for ask in asks))


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        return await work()

    return asyncio.run(whole())


class Ill:
    """An engine that never gets well."""

    max_model_len = max_embed_len = 64

    async def generate(self, ask: Request, /) -> AsyncIterator[RequestOutput]:
        if ask.prompt_token_ids:
            raise EngineDeadError("asked although it is unhealthy")
        yield RequestOutput()

    async def embed(
        self, _: Sequence[tuple[int, ...]], /, adapter: str | None = None
    ) -> list[list[float]]:
        raise EngineDeadError(f"asked although it is unhealthy, for {adapter}")

    def stats(self) -> EngineStats:
        return EngineStats()

    def health_problem(self) -> str:
        return "it is unhealthy"

    async def close(self) -> None:
        pass


def test_engines_behind_a_router_answer_as_one_does() -> None:
    async def work() -> None:
        engines = [ThreadEngineClient(engine_of(small())) for _ in range(2)]
        routed = RoutedEngineClient([engines[0], Ill(), engines[1]], "least-loaded", block_tokens=4)
        assert await all_of(routed) == expected()
        assert all(engine.stats().steps > 0 for engine in engines)
        assert routed.stats().output_tokens == 12 * len(PROMPTS)
        assert routed.router.open_requests == [0, 0, 0]
        assert routed.health_problem() == ""
        await routed.close()

    run(work)


def test_prompts_that_begin_alike_go_to_the_same_engine() -> None:
    async def work() -> None:
        engines = [ThreadEngineClient(engine_of(small())) for _ in range(2)]
        routed = RoutedEngineClient(engines, "prefix", block_tokens=4)
        for tail in ((1, 2), (3,), (4, 5, 6)):
            await tokens_of(
                routed, Request(prompt_token_ids=PROMPTS[3] + tail, sampling_params=GREEDY)
            )
        assert [engine.stats().prefix_hits for engine in engines] in ([56, 0], [0, 56])
        await routed.close()

    run(work)


def test_a_router_forgets_what_no_cache_has_room_for() -> None:
    async def work() -> None:
        engines = [ThreadEngineClient(engine_of(small())) for _ in range(2)]
        routed = RoutedEngineClient(engines, "prefix", block_tokens=4, kept_blocks=4)
        both = DisaggregatedEngineClient([engines[0]], [engines[1]], block_tokens=4, kept_blocks=4)
        for first in range(0, 80, 16):
            ask = Request(prompt_token_ids=tuple(range(first, first + 16)), sampling_params=GREEDY)
            for router in (routed, both._prefill):
                router.router.release(router._send(ask), 16)
        assert [len(each) for each in routed.router._sent] == [4, 4]
        assert [len(each) for each in both._prefill.router._sent] == [4]
        await routed.close()

    run(work)


def test_figures_say_how_many_engines_are_well_and_how_full_they_are() -> None:
    class Full(Ill):
        def stats(self) -> EngineStats:
            return EngineStats(kv_cache_usage=1.0, running=2)

        def health_problem(self) -> str:
            return ""

    async def work() -> None:
        routed = RoutedEngineClient([Full(), Ill(), Ill()]).stats()
        assert (routed.engines, routed.healthy_engines, routed.running) == (3, 1, 2)
        both = DisaggregatedEngineClient([Ill()], [Full(), Full(), Ill()]).stats()
        assert (both.engines, both.healthy_engines, both.kv_cache_usage) == (4, 2, 0.5)

    run(work)


def test_engines_are_let_go_of_at_once() -> None:
    class Slow(Ill):
        async def close(self) -> None:
            closing.append(self)
            while len(closing) < 4:
                await asyncio.sleep(0)

    closing: list[Slow] = []

    async def work() -> None:
        both = DisaggregatedEngineClient([Slow()], [Slow(), Slow(), Slow()])
        await asyncio.wait_for(both.close(), 10)
        assert len(closing) == 4

    run(work)


class Dying:
    """An engine that dies of its first ask, or of its first vectors, after some pieces."""

    max_model_len = max_embed_len = 64

    def __init__(self, pieces: int = 0) -> None:
        self._pieces, self._dead = pieces, ""

    async def generate(self, _: Request, /) -> AsyncIterator[RequestOutput]:
        for _piece in range(self._pieces):
            yield RequestOutput(token_ids=(7,))
        self._dead = "it died"
        raise EngineDeadError(self._dead)

    async def embed(
        self, _: Sequence[tuple[int, ...]], /, adapter: str | None = None
    ) -> list[list[float]]:
        self._dead = f"it died of {adapter}"
        raise EngineDeadError(self._dead)

    def stats(self) -> EngineStats:
        return EngineStats()

    def health_problem(self) -> str:
        return self._dead

    async def close(self) -> None:
        pass


def test_what_an_engine_dies_with_before_a_token_is_answered_by_another() -> None:
    async def work() -> None:
        well = ThreadEngineClient(engine_of(small()))
        for dying in (1, 2):
            engines: list[EngineClient] = [*(Dying() for _ in range(dying)), well]
            routed = RoutedEngineClient(engines, "round-robin")
            asks = [Request(prompt_token_ids=prompt, sampling_params=GREEDY) for prompt in PROMPTS]
            got = await asyncio.gather(
                *(tokens_of(routed, ask) for ask in asks), return_exceptions=True
            )
            # Once: who was with two that died may be what they died of.
            wrong = [one for one in got if isinstance(one, EngineDeadError)]
            assert len(wrong) == dying - 1
            assert [one for one in got if one in expected()] == [
                one for one in got if one not in wrong
            ]
            assert routed.router.open_requests == [0] * len(engines)
        await well.close()

    run(work)


def test_a_token_that_was_told_is_not_told_twice() -> None:
    async def work() -> None:
        well = ThreadEngineClient(engine_of(small()))
        routed = RoutedEngineClient([Dying(pieces=1), well], "round-robin")
        pieces = routed.generate(Request(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY))
        assert (await anext(pieces)).token_ids == (7,)
        with pytest.raises(EngineDeadError, match="it died"):
            await anext(pieces)
        assert routed.router.open_requests == [0, 0]
        await well.close()

    run(work)


def test_vectors_that_an_engine_died_of_are_made_by_another() -> None:
    async def work() -> None:
        well = Dying()
        well.embed = one_vector  # type: ignore[method-assign]
        routed = RoutedEngineClient([Dying(), well], "round-robin")
        assert await routed.embed([(1,)]) == [[1.0]]
        assert routed.router.open_requests == [0, 0]

    run(work)


async def one_vector(*_: object, **__: object) -> list[list[float]]:
    return [[1.0]]


def test_without_a_well_engine_asks_are_refused() -> None:
    async def work() -> None:
        routed = RoutedEngineClient([Ill(), Ill()])
        assert routed.health_problem() == "it is unhealthy; it is unhealthy"
        with pytest.raises(EngineDeadError, match="it is unhealthy"):
            await tokens_of(routed, Request(prompt_token_ids=(1,)))
        with pytest.raises(EngineDeadError, match="it is unhealthy"):
            await routed.embed([(1,)])
        assert routed.router.open_requests == [0, 0]

    run(work)


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_answers_that_are_handed_over_are_the_same(way: Any) -> None:
    async def work() -> None:
        post = create_kv_sender(way)
        first = ThreadEngineClient(engine_of(small(), parts={"kv_sender": post}))
        then = ThreadEngineClient(engine_of(small()))
        both = DisaggregatedEngineClient([first], [then], block_tokens=4)
        assert await all_of(both) == expected()
        assert first.stats().prompt_tokens == sum(map(len, PROMPTS))
        assert then.stats().prompt_tokens == 0
        assert await all_of(both, SamplingParams(temperature=0.0, max_tokens=1)) == expected(
            output=1
        )
        assert (first.stats().kv_cache_usage, then.stats().kv_cache_usage) == (0, 0)
        await both.close()

    run(work)


def test_a_seed_draws_the_same_when_it_is_handed_over() -> None:
    async def work() -> None:
        warm = SamplingParams(temperature=1.0, max_tokens=12, seed=11)
        alone = ThreadEngineClient(engine_of(small()))
        wanted = await all_of(alone, warm)
        both = DisaggregatedEngineClient(
            [ThreadEngineClient(engine_of(small()))], [ThreadEngineClient(engine_of(small()))]
        )
        assert await all_of(both, warm) == wanted
        await both.close()
        await alone.close()

    run(work)


def test_those_who_make_room_after_the_handover_compute_their_prompt_anew() -> None:
    async def work() -> None:
        then = ThreadEngineClient(engine_of(small(), blocks=14))
        both = DisaggregatedEngineClient([ThreadEngineClient(engine_of(small()))], [then])
        long = SamplingParams(temperature=0.0, max_tokens=20)
        assert await all_of(both, long) == expected(output=20)
        assert then.stats().preemptions > 0
        await both.close()

    run(work)


def test_what_another_kind_of_engine_computed_is_refused() -> None:
    async def work() -> None:
        engine = ThreadEngineClient(engine_of(small()))
        parcel = KVTransferHandle(
            transport="shm", address="nowhere", num_blocks=1, size_bytes=12, first_token_id=1
        )
        with pytest.raises(InputError, match="12 bytes for 2 blocks of 1,024"):
            await tokens_of(engine, Request(prompt_token_ids=(1, 2, 3, 4, 5), remote_kv=parcel))
        await engine.close()

    run(work)


def test_several_answers_and_lost_halves_are_left_to_the_second_engine() -> None:
    async def work() -> None:
        then = ThreadEngineClient(engine_of(small()))
        both = DisaggregatedEngineClient([Ill()], [then])
        assert await all_of(both) == expected()
        await both.close()

    run(work)


def test_what_came_meanwhile_is_read_at_once_through_a_router() -> None:
    async def work() -> None:
        routed = RoutedEngineClient([ThreadEngineClient(engine_of(small())) for _ in range(2)])
        both = DisaggregatedEngineClient(
            [ThreadEngineClient(engine_of(small()))], [ThreadEngineClient(engine_of(small()))]
        )
        for engine in (routed, both):
            pieces = engine.generate(Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY))
            found = [await anext(pieces)]
            while found[-1].finish_reason is None:
                await asyncio.sleep(0.01)
                found += pieces.take_available()
            assert [token for piece in found for token in piece.token_ids] == expected()[1]
            await pieces.aclose()
            await engine.close()
        assert routed.router.open_requests == [0, 0]

    run(work)


async def first_of(engine: EngineClient, ask: Request) -> RequestOutput:
    pieces = [piece async for piece in engine.generate(ask)]
    assert all(piece.queue_s is None and not piece.cached_tokens for piece in pieces[1:])
    return pieces[0]


def test_what_is_told_of_a_prompt_does_not_depend_on_where_it_is_computed() -> None:
    async def work() -> None:
        alone = ThreadEngineClient(engine_of(small()))
        both = DisaggregatedEngineClient(
            [ThreadEngineClient(engine_of(small()))], [ThreadEngineClient(engine_of(small()))]
        )
        for engine in (alone, both):
            ask = Request(prompt_token_ids=PROMPTS[2], sampling_params=GREEDY)
            pieces = [await first_of(engine, ask) for _ in range(2)]
            assert [piece.cached_tokens for piece in pieces] == [0, 16]
            assert all(piece.queue_s is not None for piece in pieces)
            await engine.close()

    run(work)


def test_answers_whose_likelihoods_are_told_are_handed_over_too() -> None:
    async def work() -> None:
        told = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
        alone, first = (
            ThreadEngineClient(engine_of(small())),
            ThreadEngineClient(engine_of(small())),
        )
        both = DisaggregatedEngineClient([first], [ThreadEngineClient(engine_of(small()))])
        ask = Request(prompt_token_ids=PROMPTS[2], sampling_params=told)
        found = []
        for engine in (alone, both):
            likely = [each async for piece in engine.generate(ask) for each in piece.logprobs]
            found.append(
                [
                    (each.token_id, *(token for token, _ in each.top_logprobs), each.logprob)
                    for each in likely
                ]
            )
        assert len(found[0]) == 6
        assert [each[:-1] for each in found[1]] == [each[:-1] for each in found[0]]
        logprobs = [[each[-1] for each in one] for one in found]
        assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-5)
        assert first.stats().prompt_tokens == len(PROMPTS[2])
        await alone.close()
        await both.close()

    run(work)


def test_keys_and_values_that_other_weights_made_are_computed_anew() -> None:
    async def work() -> None:
        first, then = (ThreadEngineClient(engine_of(small())) for _ in range(2))
        first.engine.weights_id = "old"
        both = DisaggregatedEngineClient([first], [then])
        assert await all_of(both) == expected()
        assert then.stats().prompt_tokens == sum(map(len, PROMPTS))
        await both.close()

    run(work)


def test_who_reads_no_further_gives_up_either_half() -> None:
    async def work() -> None:
        first, then = (ThreadEngineClient(engine_of(small())) for _ in range(2))
        both = DisaggregatedEngineClient([first], [then])
        for pieces_read in (0, 2):
            pieces = both.generate(
                Request(prompt_token_ids=PROMPTS[1], sampling_params=SamplingParams(max_tokens=50))
            )
            for _ in range(pieces_read):
                await anext(pieces)
            if not pieces_read:
                reading = asyncio.ensure_future(anext(pieces))
                await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            await pieces.aclose()
            while first.stats().running or then.stats().running:
                await asyncio.sleep(0.01)
        assert then.stats().output_tokens < 50
        await both.close()

    run(work)
