"""What an engine holds that lives but is stuck goes elsewhere, or ends; it is used again later."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.nn.huggingface import save
from meshwright.run.serve import lookout
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.engine.loop import EngineLoop
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.interface import EngineBroken, Serves
from meshwright.run.serve.routed import HandedOver, Routed
from meshwright.run.serve.worker.remote import RemoteEngine
from meshwright.spec.serving import Limits
from tests.run.serve.engine.small import engine_of, reference
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import small
from tests.run.serve.model.test_gguf import trained
from tests.run.serve.test_routed import GREEDY, run, tokens_of

LONG = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)


class Stuck(EngineLoop):
    """An engine whose steps end only while it `goes`, after the first `steps`."""

    def __init__(self, steps: int = 0) -> None:
        super().__init__(engine_of(small()), stuck_s=0.3)
        self.goes = threading.Event()
        worker, turn = self._worker, self._worker.turn
        left = [steps]

        def slow() -> bool:
            if not left[0]:
                self.goes.wait()
            left[0] = max(0, left[0] - 1)
            return turn()

        worker.turn = slow  # type: ignore[method-assign]

    async def close(self) -> None:
        self.goes.set()
        await super().close()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "LOOK_S", 0.05)


async def well_again(engine: Serves) -> None:
    while engine.ill():
        await asyncio.sleep(0.02)


async def idle(stuck: Stuck) -> None:
    while not stuck.engine.is_idle:
        await asyncio.sleep(0.02)


def test_what_a_stuck_engine_has_not_begun_is_answered_by_another() -> None:
    async def work() -> None:
        stuck, well = Stuck(), EngineLoop(engine_of(small()))
        routed = Routed([stuck, well], "round-robin")
        asks = [Ask(prompt=prompt, sampling=GREEDY) for prompt in PROMPTS]
        got = await asyncio.wait_for(asyncio.gather(*(tokens_of(routed, a) for a in asks)), 60)
        assert got == expected()
        assert routed.router.open == [0, 0]
        assert stuck.ill()
        assert not routed.ill(), "the other one is well"
        assert await tokens_of(routed, asks[0]) == expected()[0], "new ones avoid it"
        stuck.goes.set()
        await well_again(stuck)
        await idle(stuck)
        assert stuck.gauges().kv_usage == 0, "it answers nobody twice"
        before = stuck.gauges().steps
        assert [await tokens_of(routed, asks[0]) for _ in range(2)] == [expected()[0]] * 2
        assert stuck.gauges().steps > before, "it is used again"
        await routed.close()

    run(work)


def test_an_answer_that_a_stuck_engine_has_begun_ends_with_an_error() -> None:
    async def work() -> None:
        stuck, well = Stuck(steps=8), EngineLoop(engine_of(small()))
        routed = Routed([stuck, well], "round-robin")
        got: list[int] = []

        async def read() -> None:
            async for piece in routed.answer(Ask(prompt=PROMPTS[0], sampling=LONG)):
                got.extend(piece.tokens)

        with pytest.raises(EngineBroken, match="a step has not ended"):
            await asyncio.wait_for(read(), 60)
        assert got == reference(small, PROMPTS[0], 40)[: len(got)]
        assert 0 < len(got) < 40
        assert routed.router.open == [0, 0]
        stuck.goes.set()
        await idle(stuck)
        assert stuck.gauges().running == 0
        await routed.close()

    run(work)


def test_where_all_engines_are_stuck_nobody_waits_for_them() -> None:
    async def work() -> None:
        routed = Routed([Stuck(), Stuck()])
        with pytest.raises(EngineBroken, match="a step has not ended"):
            await asyncio.wait_for(tokens_of(routed, Ask(prompt=PROMPTS[0], sampling=GREEDY)), 60)
        with pytest.raises(EngineBroken, match="a step has not ended"):
            await routed.embed([PROMPTS[0]])
        assert routed.router.open == [0, 0]
        await routed.close()

    run(work)


def test_a_prompt_that_a_stuck_engine_was_to_compute_is_computed_by_who_answers() -> None:
    async def work() -> None:
        stuck, then = Stuck(), EngineLoop(engine_of(small()))
        both = HandedOver([stuck], [then])
        ask = Ask(prompt=PROMPTS[0], sampling=GREEDY)
        assert await asyncio.wait_for(tokens_of(both, ask), 60) == expected()[0]
        await both.close()

    run(work)


def test_nobody_looks_at_engines_that_have_nothing_to_do() -> None:
    async def work() -> None:
        routed = Routed([EngineLoop(engine_of(small()))])
        await tokens_of(routed, Ask(prompt=PROMPTS[0], sampling=GREEDY))
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.02)
        await routed.close()

    run(work)


async def _stopped(folder: Path) -> None:
    limits = Limits(batch_tokens=24, batch_requests=8, block_tokens=4, kv_blocks=64)
    settings = EngineSettings(limits=limits, device="cpu", max_length=64)
    first, second = [RemoteEngine(folder, settings, threads=1, stuck_s=2.0) for _ in range(2)]
    routed = Routed([first, second], "round-robin", block_tokens=4)
    ask = Ask(prompt=PROMPTS[0], sampling=LONG)
    told = reference(small, PROMPTS[0], 40)
    assert [await tokens_of(routed, ask) for _ in range(2)] == [told] * 2
    pid = first.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = [tokens_of(routed, ask) for _ in range(4)]
        assert await asyncio.wait_for(asyncio.gather(*asked), 60) == [told] * 4
        assert "has not been heard" in first.ill()
        assert routed.gauges().well == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(well_again(first), 60)
    assert first.process.pid == pid, "it is the same process"
    assert (first.gauges().running, first.gauges().waiting) == (0, 0)
    assert [await tokens_of(routed, ask) for _ in range(2)] == [told] * 2
    assert routed.router.open == [0, 0]
    # Vectors go elsewhere just so.
    os.kill(pid, signal.SIGSTOP)
    try:
        vectors = [routed.embed([PROMPTS[0]]) for _ in range(2)]
        one, other = await asyncio.wait_for(asyncio.gather(*vectors), 60)
        assert one == other
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(well_again(first), 60)
    await routed.close()


def test_a_process_that_is_stopped_is_left_out_until_it_goes_on(tmp_path: Path) -> None:
    save(small(), tmp_path)
    trained(digits=True).save(str(tmp_path / "tokenizer.json"))
    asyncio.run(_stopped(tmp_path))
