"""Several engines sleep, wake and take new weights together, or not at all."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.serve.client.disaggregated_client import DisaggregatedEngineClient
from meshwright.run.serve.client.routed_client import RoutedEngineClient
from meshwright.run.serve.client.thread_client import ThreadEngineClient
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.executor import rank_commands
from meshwright.run.serve.engine.startup import start_engine
from meshwright.run.serve.engine_client import MEMORY_TAGS, EngineClient, EngineDeadError, MemoryTag
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.serve.engine.test_engine import PROMPTS
from tests.run.serve.model.small import made, small
from tests.run.serve.model.test_gguf import trained
from tests.run.serve.server.pretend import PretendEngine

ASK = Request(
    prompt_token_ids=(65, 66, 67), sampling_params=SamplingParams(temperature=0.0, max_tokens=3)
)
LIMITS = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=4, block_size=4, num_gpu_blocks=48)
Change = Callable[[Any], Awaitable[None]]


class Stubborn(PretendEngine):
    """Cannot do one thing."""

    def __init__(self, cannot: str, error: Exception) -> None:
        super().__init__()
        self.cannot, self.error, self.tried = cannot, error, 0

    def _try(self, what: str) -> None:
        if what == self.cannot:
            self.tried += 1
            raise self.error

    async def sleep(self, level: int) -> None:
        self._try(f"sleep {level}")
        await super().sleep(level)

    async def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        self._try("wake")
        await super().wake_up(parts)

    async def update_weights(self, path: str) -> None:
        self._try(path)
        await super().update_weights(path)


WRONG = InputError([Problem("path", "no such folder", "look for it")])
DEAD = EngineDeadError("the engine's process was ended by SIGKILL")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_all_engines_change() -> None:
    async def work() -> None:
        engines = [PretendEngine() for _ in range(3)]
        for both in (
            RoutedEngineClient(engines),
            DisaggregatedEngineClient(engines[:1], engines[1:]),
        ):
            await both.sleep(1)
            assert [engine.sleeps for engine in engines] == [True] * 3
            assert both.is_sleeping()
            await both.wake_up()
            assert [engine.sleeps for engine in engines] == [False] * 3
            assert not both.is_sleeping()
            await both.update_weights("new")
            assert [engine.path for engine in engines] == ["new"] * 3

    run(work())


@pytest.mark.parametrize(
    ("cannot", "change"),
    [
        ("sleep 1", lambda all_of: all_of.sleep(1)),
        ("sleep 1", lambda all_of: all_of.sleep(2)),
        ("new", lambda all_of: all_of.update_weights("new")),
    ],
)
@pytest.mark.parametrize("error", [WRONG, DEAD])
def test_where_one_cannot_the_others_go_back(cannot: str, change: Change, error: Exception) -> None:
    async def work() -> None:
        well = [PretendEngine(), PretendEngine()]
        routed = RoutedEngineClient([well[0], Stubborn(cannot, error), well[1]], weights="old")
        with pytest.raises(type(error), match="engine 2 of 3 cannot") as caught:
            await change(routed)
        assert str(error.args[0]).split(" (")[0].split(": ")[-1] in str(caught.value)
        assert [engine.sleeps for engine in well] == [False, False]
        assert {engine.path for engine in well} <= {"", "old"}
        assert routed.health_problem() == ""
        assert [piece async for piece in routed.generate(ASK)]

    run(work())


def test_where_one_cannot_wake_all_sleep_on() -> None:
    async def work() -> None:
        engines = [PretendEngine(), Stubborn("wake", DEAD)]
        routed = RoutedEngineClient(engines)
        await routed.sleep(1)
        with pytest.raises(
            EngineDeadError, match=r"engine 2 of 2 cannot wake up.*others still sleep"
        ):
            await routed.wake_up()
        assert [engine.sleeps for engine in engines] == [True, True]

    run(work())


def test_weights_that_differ_answer_nothing_until_they_are_the_same() -> None:
    async def work() -> None:
        broken = Stubborn("new", DEAD)
        routed = RoutedEngineClient(
            [PretendEngine(), broken]
        )  # nobody says where the old ones were
        with pytest.raises(EngineDeadError, match="the others are changed already"):
            await routed.update_weights("new")
        assert "engine 2 of 2 cannot update its weights" in routed.health_problem()
        with pytest.raises(EngineDeadError, match="engine 2 of 2"):
            routed.generate(ASK)
        broken.cannot = ""
        await routed.update_weights("new")
        assert routed.health_problem() == ""
        assert [piece async for piece in routed.generate(ASK)]

    run(work())


def test_weights_are_let_go_of_only_where_all_sleep() -> None:
    async def work() -> None:
        engines = [Stubborn("sleep 2", DEAD), Stubborn("sleep 1", DEAD)]
        with pytest.raises(EngineDeadError, match="engine 2 of 2 cannot sleep"):
            await RoutedEngineClient(engines).sleep(2)
        assert engines[0].tried == 0
        engines[1].cannot = ""
        with pytest.raises(EngineDeadError, match="engine 1 of 2 cannot discard its weights"):
            await RoutedEngineClient(engines).sleep(2)

    run(work())


def test_nothing_changes_while_requests_run_or_one_is_unhealthy() -> None:
    async def work() -> None:
        engines = [PretendEngine(), PretendEngine()]
        for both in (
            RoutedEngineClient(engines),
            DisaggregatedEngineClient(engines[:1], engines[1:]),
        ):
            pieces = both.generate(ASK)
            await anext(pieces)
            for change in (both.sleep(1), both.update_weights("new")):
                with pytest.raises(InputError, match="while requests are running"):
                    await change
            await pieces.aclose()
            engines[1].reason = "it is stuck"
            with pytest.raises(EngineDeadError, match=r"engine 2 of 2.*stuck; nothing was changed"):
                await both.sleep(1)
            engines[1].reason = ""
            await both.sleep(1)
            await both.wake_up()

    run(work())


def test_no_asks_are_taken_while_weights_change() -> None:
    class Slow(PretendEngine):
        async def update_weights(self, path: str) -> None:
            await asyncio.sleep(0.01)
            await super().update_weights(path)

    async def work() -> None:
        for both in (
            RoutedEngineClient([Slow(), Slow()]),
            DisaggregatedEngineClient([Slow()], [Slow()]),
        ):
            changing = asyncio.create_task(both.update_weights("new"))
            await asyncio.sleep(0)
            assert both.health_problem() == "the engines are updating their weights"
            with pytest.raises(EngineDeadError, match="updating their weights"):
                both.generate(ASK)
            await changing
            assert both.health_problem() == ""

    run(work())


async def _greedy(engine: EngineClient) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    ask = Request(prompt_token_ids=PROMPTS[1], sampling_params=sampling)
    return [token async for piece in engine.generate(ask) for token in piece.token_ids]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Write a model, and weights that answer otherwise."""
    found = tmp_path / "model", tmp_path / "new"
    for folder, scale in zip(found, (1.0, 1.3), strict=True):
        decoder = made(small().model)
        with torch.no_grad():
            for weight in decoder.parameters():
                weight.mul_(scale)
        save_hf_checkpoint(decoder, folder)
    trained(digits=True).save(str(found[0] / "tokenizer.json"))
    return found


def test_an_engine_with_some_of_its_new_weights_answers_nothing(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(decoder: torch.nn.Module, _: str) -> None:
        next(iter(decoder.parameters())).data.zero_()
        raise OSError("the disk is gone")

    async def work() -> None:
        settings = EngineConfig(scheduler_config=LIMITS, device="cpu", max_model_len=64)
        started = start_engine(folders[0], settings)
        engine = ThreadEngineClient(started.engine, started.lifecycle)
        monkeypatch.setattr(rank_commands, "load_hf_checkpoint", broken)
        with pytest.raises(EngineDeadError, match="the disk is gone"):
            await engine.update_weights(str(folders[1]))
        while not engine.health_problem():
            await asyncio.sleep(0.001)
        with pytest.raises(EngineDeadError, match="broke off"):
            await _greedy(engine)
        await engine.close()

    run(work())


def test_how_deep_engines_sleep_follows_their_weights(folders: tuple[Path, Path]) -> None:
    async def work() -> None:
        settings = EngineConfig(scheduler_config=LIMITS, device="cpu", max_model_len=64)
        started = start_engine(folders[0], settings)
        routed = RoutedEngineClient([ThreadEngineClient(started.engine, started.lifecycle)])
        assert routed.sleep_level() == 0
        for level, deep in ((1, 1), (2, 2), (1, 2)):
            await routed.sleep(level)
            assert routed.sleep_level() == deep, "what is gone does not come back by itself"
        await routed.wake_up(["weights"])
        assert routed.sleep_level() == 1, "only its cache sleeps"
        await routed.wake_up(["cache"])
        assert routed.sleep_level() == 0
        await routed.sleep(1)
        assert routed.sleep_level() == 1
        await routed.wake_up()
        (engine,) = routed.engines
        assert isinstance(engine, ThreadEngineClient)
        await engine.sleep(0)
        assert routed.sleep_level() == 1, "its weights are there, and its cache is not"
        await routed.close()

    run(work())


def test_engines_of_a_model_take_its_new_weights(folders: tuple[Path, Path]) -> None:
    async def work() -> None:
        settings = EngineConfig(scheduler_config=LIMITS, device="cpu", max_model_len=64)
        engines = []
        for _ in range(2):
            started = start_engine(folders[0], settings)
            engines.append(ThreadEngineClient(started.engine, started.lifecycle))
        routed = RoutedEngineClient(engines, "round-robin", block_tokens=4, weights=str(folders[0]))
        old = await _greedy(routed)
        with pytest.raises(InputError, match="engine 1 of 2 cannot update its weights"):
            await routed.update_weights(str(folders[0] / "none"))
        await routed.sleep(1)
        with pytest.raises(InputError, match="is sleeping"):
            await routed.update_weights(str(folders[1]))
        await routed.wake_up()
        assert [await _greedy(routed) for _ in range(2)] == [old, old]
        await routed.sleep(1)
        await routed.sleep(2)
        await routed.wake_up()
        assert await _greedy(routed) != old
        await routed.update_weights(str(folders[1]))
        new = [await _greedy(routed) for _ in range(2)]
        assert new[0] == new[1] != old
        await routed.sleep(2)
        await routed.wake_up(["weights"])
        assert routed.is_sleeping()
        await routed.update_weights(str(folders[0]))
        await routed.wake_up(["cache"])
        assert [await _greedy(routed) for _ in range(2)] == [old, old]
        await routed.close()

    run(work())
