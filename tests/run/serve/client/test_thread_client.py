"""What one asks of an engine in a thread harms nobody else, and nobody waits for ever."""

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.run.serve.client.thread_client import ThreadEngineClient
from meshwright.run.serve.engine.executor.rank_commands import (
    PartialUpdateError,
    RankCommand,
    ServingCommandHandler,
)
from meshwright.run.serve.engine.lifecycle import EngineLifecycle
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.kv_transfer.handle import KVTransferHandle
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.worker.engine_worker import create_utility_handler
from tests.run.serve.engine.small import engine_of
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import small

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def made(**given: Any) -> ThreadEngineClient:
    engine = engine_of(small(), **given)
    assert isinstance(engine.runner, ModelRunner)
    doer = ServingCommandHandler(engine.runner, graphs=False, batch_tokens=24, rows=8)
    return ThreadEngineClient(engine, EngineLifecycle(engine, doer))


async def tokens_of(loop: ThreadEngineClient, ask: Request) -> list[int]:
    return [token async for piece in loop.generate(ask) for token in piece.token_ids]


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(whole())


class SlowSender:
    """Has the keys and values of a prompt, and sends none before it is let."""

    def __init__(self, loop: ThreadEngineClient, prompt: tuple[int, ...]) -> None:
        cache = loop.engine.runner.kv_cache
        blocks = -(-len(prompt) // cache.block_size)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.let, self.asked = threading.Event(), threading.Event()
        self.parcel = KVTransferHandle(
            transport="tcp",
            address=f"127.0.0.1:{self._listening.getsockname()[1]}",
            secret="00" * 32,
            num_blocks=blocks,
            size_bytes=blocks * cache.block_bytes,
            first_token_id=1,
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        way, _ = self._listening.accept()
        with way, self._listening:
            self.asked.set()
            self.let.wait(60)
            way.sendall(struct.pack("<Q", self.parcel.size_bytes) + bytes(self.parcel.size_bytes))


def test_an_ask_that_crosses_a_sleep_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = made()
        ask, turn = Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY), loop.engine.step
        stepping, goes_on = threading.Event(), threading.Event()

        def slow() -> bool:
            stepping.set()
            goes_on.wait(30)
            return turn()

        monkeypatch.setattr(loop.engine, "step", slow)
        waking = asyncio.ensure_future(loop.wake_up())
        await asyncio.to_thread(stepping.wait, 30)
        sleeping = asyncio.ensure_future(loop.sleep(1))
        await asyncio.sleep(0)
        crossing = loop.generate(ask)
        goes_on.set()
        with pytest.raises(InputError, match="is sleeping"):
            await anext(crossing)
        await asyncio.gather(waking, sleeping)
        assert loop.health_problem() == ""
        await loop.wake_up()
        assert await tokens_of(loop, ask) == expected()[1]
        await loop.close()

    run(work)


def test_a_change_that_leaves_an_engine_as_it_was_is_told_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    async def work() -> None:
        loop, ask = made(), Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY)
        await loop.sleep(1)
        with monkeypatch.context() as patch:
            patch.setattr(loop.engine.runner.kv_cache, "wake_up", no_memory)
            with pytest.raises(EngineDeadError, match="cannot wake, and sleeps on: out of memory"):
                await loop.wake_up()
        assert loop.is_sleeping()
        assert loop.health_problem() == ""
        await loop.wake_up()
        assert await tokens_of(loop, ask) == expected()[1]
        await loop.close()

    run(work)


@pytest.mark.parametrize(
    "error", [PartialUpdateError("the disk is gone"), RuntimeError("of the driver")]
)
def test_a_change_that_breaks_off_is_told_before_the_engine_ends(error: Exception) -> None:
    def breaks(_: RankCommand) -> list[float]:
        raise error

    async def work() -> None:
        loop = made()
        loop._worker._perform = create_utility_handler(EngineLifecycle(loop.engine, breaks))
        told = (
            "the disk is gone"
            if isinstance(error, PartialUpdateError)
            else r"internal engine error \(Runtime"
        )
        with pytest.raises(EngineDeadError, match=told):
            await loop.sleep(1)
        while not loop.health_problem():
            await asyncio.sleep(0.001)
        assert "the engine broke" in loop.health_problem()
        await loop.close()

    run(work)


def test_an_engine_that_waits_for_keys_and_values_neither_sleeps_nor_changes() -> None:
    async def work() -> None:
        loop = made()
        sender = SlowSender(loop, PROMPTS[1])
        inbox = loop.generate(
            Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY, remote_kv=sender.parcel)
        )
        await asyncio.to_thread(sender.asked.wait, 30)
        for change in (loop.sleep(1), loop.update_weights("elsewhere")):
            with pytest.raises(InputError, match="while requests are running"):
                await change
        sender.let.set()
        assert len([token async for piece in inbox for token in piece.token_ids]) == 12
        await loop.sleep(1)
        await loop.close()

    run(work)


def test_keys_and_values_that_nobody_waits_for_any_more_are_left() -> None:
    async def work() -> None:
        loop = made()
        sender = SlowSender(loop, PROMPTS[1])
        inbox = loop.generate(
            Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY, remote_kv=sender.parcel)
        )
        await asyncio.to_thread(sender.asked.wait, 30)
        await inbox.aclose()
        sender.let.set()
        await loop.sleep(1)
        await loop.wake_up()
        await asyncio.sleep(0.1)
        assert loop.stats().output_tokens == 0
        assert (loop.health_problem(), loop.engine.pending_external_jobs) == ("", 0)
        await loop.close()

    run(work)


@pytest.mark.parametrize("end", ["breaks", "is closed"])
def test_whatever_waits_when_an_engine_ends_is_told_so(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        loop = made()
        stepping, goes_on = threading.Event(), threading.Event()

        def stuck() -> bool:
            stepping.set()
            goes_on.wait(30)
            if end == "breaks":
                raise RuntimeError("the device is gone")
            return False

        monkeypatch.setattr(loop.engine, "step", stuck)
        inbox = loop.generate(Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY))
        await asyncio.to_thread(stepping.wait, 30)
        waiting = [
            asyncio.ensure_future(each)
            for each in (loop.embed([PROMPTS[1]]), loop.sleep(1), loop.wake_up())
        ]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(loop.close()) if end == "is closed" else None
        await asyncio.sleep(0)
        goes_on.set()
        why = "device is gone" if end == "breaks" else "was closed"
        for each in waiting:
            with pytest.raises(EngineDeadError, match=why):
                await each
        with pytest.raises(EngineDeadError, match=why):  # nothing was told: another may answer
            await anext(inbox)
        await (closing or loop.close())

    run(work)


def test_prompts_longer_than_the_cache_are_not_embedded() -> None:
    async def work() -> None:
        loop = made(blocks=8)
        assert (loop.max_model_len, loop.max_embed_len) == (33, 32)
        (vector,) = await loop.embed([PROMPTS[3][:1] * 32])
        assert sum(each * each for each in vector) == pytest.approx(1)
        with pytest.raises(InputError, match="at most 32"):
            await loop.embed([PROMPTS[3][:1] * 33])
        await loop.close()

    run(work)


def test_vectors_wait_for_those_who_run_and_not_for_those_who_wait() -> None:
    async def work() -> None:
        loop = made(blocks=16, max_num_seqs=4, enable_prefix_caching=False)
        alone = await made().embed([PROMPTS[3] + PROMPTS[5]])
        inboxes = [
            loop.generate(Request(prompt_token_ids=PROMPTS[1], sampling_params=LONG))
            for _ in range(12)
        ]
        heard: list[list[int]] = [[] for _ in inboxes]

        async def listen(at: int) -> None:
            async for piece in inboxes[at]:
                heard[at] += piece.token_ids

        listening = [asyncio.ensure_future(listen(at)) for at in range(len(inboxes))]
        while not all(heard[:4]):  # four sequences run, so fewer than 14 blocks are free
            await asyncio.sleep(0.001)
        before = len(heard[0])
        # 14 of 16 blocks: as long as others are let in, they are never free together.
        vectors = await loop.embed([PROMPTS[3] + PROMPTS[5]])
        assert vectors[0] == pytest.approx(alone[0], abs=1e-5)
        assert before < len(heard[0]), "answers came while it waited"
        assert sum(len(each) == 40 for each in heard) <= 4, "most had not even begun"
        await asyncio.gather(*listening)
        assert heard == [expected([PROMPTS[1]], 40)[0]] * 12
        assert loop.stats().kv_cache_usage == 0
        await loop.close()

    run(work)


def test_others_are_asked_and_cancelled_while_vectors_wait() -> None:
    async def work() -> None:
        loop = made(blocks=16, enable_prefix_caching=False)
        running = loop.generate(
            Request(prompt_token_ids=PROMPTS[4], sampling_params=replace(LONG, max_tokens=56))
        )
        await anext(running)
        waiting = asyncio.ensure_future(loop.embed([PROMPTS[3] * 2]))
        await asyncio.sleep(0)
        behind = asyncio.ensure_future(
            tokens_of(loop, Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY))
        )
        await asyncio.sleep(0)
        await running.aclose()
        assert len((await waiting)[0]) == 32
        assert await behind == expected()[1]
        assert loop.stats().output_tokens < 56 + 12
        await loop.close()

    run(work)


def test_vectors_that_nobody_waits_for_any_more_give_their_room_back() -> None:
    async def work() -> None:
        loop = made(blocks=16, enable_prefix_caching=False)
        running = loop.generate(
            Request(prompt_token_ids=PROMPTS[4], sampling_params=replace(LONG, max_tokens=40))
        )
        await anext(running)
        waiting = asyncio.ensure_future(loop.embed([PROMPTS[3] * 2]))
        await asyncio.sleep(0)
        behind = asyncio.ensure_future(
            tokens_of(loop, Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY))
        )
        await asyncio.sleep(0)
        waiting.cancel()
        assert await behind == expected()[1]
        await running.aclose()
        while loop.stats().running:
            await asyncio.sleep(0.001)
        assert (loop.stats().kv_cache_usage, loop.engine.pending_external_jobs) == (0, 0)
        await loop.close()

    run(work)


def test_what_goes_wrong_with_one_prompt_harms_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        loop = made()
        assert loop._upkeep is not None
        doer = loop._upkeep.run_on_all_ranks

        def broken(do: RankCommand) -> list[float]:
            if do.prompt_token_ids == PROMPTS[0]:
                raise RuntimeError("out of memory")
            return doer(do)

        loop._upkeep.run_on_all_ranks = broken
        with pytest.raises(
            EngineDeadError, match=r"internal engine error \(RuntimeError\), see the engine log"
        ):
            await loop.embed([PROMPTS[1], PROMPTS[0]])
        assert loop.health_problem() == ""
        assert len(await loop.embed([PROMPTS[1]])) == 1
        assert (
            await tokens_of(loop, Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY))
            == expected()[1]
        )
        assert loop.stats().kv_cache_usage == 0
        await loop.close()

    with caplog.at_level(logging.ERROR):
        run(work)
    assert "out of memory" in caplog.text


def test_what_goes_wrong_with_one_ask_harms_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = made()
        check = loop.engine.validate_request

        def broken(ask: Request) -> None:
            if ask.tenant == "odd":
                raise KeyError("what nobody thought of")
            check(ask)

        monkeypatch.setattr(loop.engine, "validate_request", broken)
        with pytest.raises(EngineDeadError, match=r"internal engine error \(KeyError\)"):
            await tokens_of(
                loop, Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY, tenant="odd")
            )
        assert (
            await tokens_of(loop, Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY))
            == expected()[1]
        )
        await loop.close()

    run(work)
