"""What an engine holds that lives but is stuck goes elsewhere, or ends; it is used again later."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.serve.client import routed_client
from meshwright.run.serve.client.disaggregated_client import DisaggregatedEngineClient
from meshwright.run.serve.client.process_client import ProcessEngineClient
from meshwright.run.serve.client.routed_client import RoutedEngineClient
from meshwright.run.serve.client.thread_client import ThreadEngineClient
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine_client import EngineClient, EngineDeadError
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.serve.client.test_routed_client_serve import GREEDY, run, tokens_of
from tests.run.serve.engine.small import engine_of, reference
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import small
from tests.run.serve.model.test_gguf import trained

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class Stuck(ThreadEngineClient):
    """An engine whose steps end only while it `goes`, after the first `steps`."""

    def __init__(self, steps: int = 0) -> None:
        super().__init__(engine_of(small()), stuck_s=0.3)
        self.goes = threading.Event()
        worker, turn = self._worker, self._worker.run_step
        left = [steps]

        def slow() -> bool:
            if not left[0]:
                self.goes.wait()
            left[0] = max(0, left[0] - 1)
            return turn()

        worker.run_step = slow  # type: ignore[method-assign]

    async def close(self) -> None:
        self.goes.set()
        await super().close()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_client, "HEALTH_CHECK_INTERVAL_S", 0.05)


async def well_again(engine: EngineClient) -> None:
    while engine.health_problem():
        await asyncio.sleep(0.02)


async def idle(stuck: Stuck) -> None:
    while not stuck.engine.is_idle:
        await asyncio.sleep(0.02)


def test_what_a_stuck_engine_has_not_begun_is_answered_by_another() -> None:
    async def work() -> None:
        stuck, well = Stuck(), ThreadEngineClient(engine_of(small()))
        routed = RoutedEngineClient([stuck, well], "round-robin")
        asks = [Request(prompt_token_ids=prompt, sampling_params=GREEDY) for prompt in PROMPTS]
        got = await asyncio.wait_for(asyncio.gather(*(tokens_of(routed, a) for a in asks)), 60)
        assert got == expected()
        assert routed.router.open_requests == [0, 0]
        assert stuck.health_problem()
        assert not routed.health_problem(), "the other one is well"
        assert await tokens_of(routed, asks[0]) == expected()[0], "new ones avoid it"
        stuck.goes.set()
        await well_again(stuck)
        await idle(stuck)
        assert stuck.stats().kv_cache_usage == 0, "it answers nobody twice"
        before = stuck.stats().steps
        assert [await tokens_of(routed, asks[0]) for _ in range(2)] == [expected()[0]] * 2
        assert stuck.stats().steps > before, "it is used again"
        await routed.close()

    run(work)


def test_an_answer_that_a_stuck_engine_has_begun_ends_with_an_error() -> None:
    async def work() -> None:
        stuck, well = Stuck(steps=8), ThreadEngineClient(engine_of(small()))
        routed = RoutedEngineClient([stuck, well], "round-robin")
        got: list[int] = []

        async def read() -> None:
            async for piece in routed.generate(
                Request(prompt_token_ids=PROMPTS[0], sampling_params=LONG)
            ):
                got.extend(piece.token_ids)

        with pytest.raises(EngineDeadError, match="engine step has not finished"):
            await asyncio.wait_for(read(), 60)
        assert got == reference(small, PROMPTS[0], 40)[: len(got)]
        assert 0 < len(got) < 40
        assert routed.router.open_requests == [0, 0]
        stuck.goes.set()
        await idle(stuck)
        assert stuck.stats().running == 0
        await routed.close()

    run(work)


def test_where_all_engines_are_stuck_nobody_waits_for_them() -> None:
    async def work() -> None:
        routed = RoutedEngineClient([Stuck(), Stuck()])
        with pytest.raises(EngineDeadError, match="engine step has not finished"):
            await asyncio.wait_for(
                tokens_of(routed, Request(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY)), 60
            )
        with pytest.raises(EngineDeadError, match="engine step has not finished"):
            await routed.embed([PROMPTS[0]])
        assert routed.router.open_requests == [0, 0]
        await routed.close()

    run(work)


def test_a_prompt_that_a_stuck_engine_was_to_compute_is_computed_by_who_answers() -> None:
    async def work() -> None:
        stuck, then = Stuck(), ThreadEngineClient(engine_of(small()))
        both = DisaggregatedEngineClient([stuck], [then])
        ask = Request(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY)
        assert await asyncio.wait_for(tokens_of(both, ask), 60) == expected()[0]
        await both.close()

    run(work)


def test_nobody_looks_at_engines_that_have_nothing_to_do() -> None:
    async def work() -> None:
        routed = RoutedEngineClient([ThreadEngineClient(engine_of(small()))])
        await tokens_of(routed, Request(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY))
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.02)
        await routed.close()

    run(work)


async def _stopped(folder: Path) -> None:
    limits = SchedulerConfig(
        max_num_batched_tokens=24, max_num_seqs=8, block_size=4, num_gpu_blocks=64
    )
    settings = EngineConfig(scheduler_config=limits, device="cpu", max_model_len=64)
    first, second = [
        ProcessEngineClient(folder, settings, threads=1, stuck_s=2.0) for _ in range(2)
    ]
    routed = RoutedEngineClient([first, second], "round-robin", block_tokens=4)
    ask = Request(prompt_token_ids=PROMPTS[0], sampling_params=LONG)
    told = reference(small, PROMPTS[0], 40)
    assert [await tokens_of(routed, ask) for _ in range(2)] == [told] * 2
    pid = first.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = [tokens_of(routed, ask) for _ in range(4)]
        assert await asyncio.wait_for(asyncio.gather(*asked), 60) == [told] * 4
        assert "has not been heard" in first.health_problem()
        assert routed.stats().healthy_engines == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(well_again(first), 60)
    assert first.process.pid == pid, "it is the same process"
    assert (first.stats().running, first.stats().waiting) == (0, 0)
    assert [await tokens_of(routed, ask) for _ in range(2)] == [told] * 2
    assert routed.router.open_requests == [0, 0]
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
    save_hf_checkpoint(small(), tmp_path)
    trained(digits=True).save(str(tmp_path / "tokenizer.json"))
    asyncio.run(_stopped(tmp_path))
