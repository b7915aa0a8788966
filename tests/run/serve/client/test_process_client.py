"""An engine in its own process answers, dies, says so, and is there again."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.serve.client import process_client
from meshwright.run.serve.client.disaggregated_client import DisaggregatedEngineClient
from meshwright.run.serve.client.engine_process import EngineProcess
from meshwright.run.serve.client.process_client import ProcessEngineClient
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.kv_transfer.handle import KVTransferError, KVTransferHandle
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.worker.protocol import StartEngine
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.serve.engine.small import reference
from tests.run.serve.model.small import small
from tests.run.serve.model.test_gguf import trained

LIMITS = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=8, block_size=4, num_gpu_blocks=64)
PROMPT = (5, 6, 7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf_checkpoint(small(), tmp_path)
    trained(digits=True).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


class Mortal(EngineProcess):
    """A process without an engine, of which the second one is never ready."""

    def __init__(self, start: StartEngine, **given: Any) -> None:
        super().__init__(start, "tests.run.serve.worker.mortal", **given)


class Reading(EngineProcess):
    """A process without an engine that reads weights while a file is there."""

    def __init__(self, start: StartEngine, **given: Any) -> None:
        super().__init__(start, "tests.run.serve.worker.reading", **given)


async def heard(engine: ProcessEngineClient, ask: Request) -> list[RequestOutput]:
    return [piece async for piece in engine.generate(ask)]


async def come_to(engine: ProcessEngineClient) -> None:
    while engine.health_problem():
        await asyncio.sleep(0.05)


async def _life(folder: Path) -> None:
    engine = ProcessEngineClient(
        folder, EngineConfig(scheduler_config=LIMITS, device="cpu", max_model_len=64)
    )
    assert engine.stats().num_gpu_blocks == 64, "before anybody asked"
    asks = [
        Request(
            prompt_token_ids=PROMPT,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        ),
        Request(
            prompt_token_ids=PROMPT,
            sampling_params=SamplingParams(max_tokens=60, ignore_eos=True, n=2),
        ),
    ]
    pieces = await heard(engine, asks[0])
    wanted = reference(small, PROMPT, 12)
    assert [token for piece in pieces for token in piece.token_ids] == wanted
    with pytest.raises(InputError, match="no token"):
        await heard(engine, Request(prompt_token_ids=()))
    (vector,) = await engine.embed([PROMPT])
    assert sum(each * each for each in vector) == pytest.approx(1)
    with pytest.raises(InputError, match="poet"):
        await engine.embed([PROMPT], adapter="poet")
    # Death, in the midst of an answer of two choices.
    under_way = engine.generate(asks[1])
    await anext(under_way)
    os.kill(engine.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="ended by SIGKILL"):
        [piece async for piece in under_way]
    assert "another one is starting" in engine.health_problem()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await heard(engine, asks[0])
    await asyncio.wait_for(come_to(engine), 120)
    pieces = await heard(engine, asks[0])
    assert [token for piece in pieces for token in piece.token_ids] == wanted
    # Two answers of the first process and the last one's; the beat that tells comes before its end.
    assert engine.stats().prompt_tokens >= 2 * len(PROMPT)
    assert engine.stats().output_tokens >= 24
    assert engine.stats().running == 0
    process = engine.process
    await engine.close()
    assert "engine's process" in process.exit_reason()


@pytest.mark.slow
def test_an_engine_that_dies_says_so_and_comes_back(folder: Path) -> None:
    asyncio.run(_life(folder))


async def _renewed(folder: Path, new: Path) -> None:
    engine = ProcessEngineClient(
        folder, EngineConfig(scheduler_config=LIMITS, device="cpu", max_model_len=64)
    )
    ask = Request(
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    )
    old = [piece.token_ids for piece in await heard(engine, ask)]
    await engine.update_weights(str(new))
    changed = [piece.token_ids for piece in await heard(engine, ask)]
    assert changed != old
    os.kill(engine.process.pid, signal.SIGKILL)
    while not engine.health_problem():
        await asyncio.sleep(0.05)
    await asyncio.wait_for(come_to(engine), 120)
    assert [piece.token_ids for piece in await heard(engine, ask)] == changed
    # Where they are gone, it answers nothing rather than with others.
    (new / "model.safetensors").rename(new / "hidden")
    os.kill(engine.process.pid, signal.SIGKILL)
    while "cannot be read again" not in engine.health_problem():
        await asyncio.sleep(0.05)
    with pytest.raises(EngineDeadError, match="cannot be read again"):
        await heard(engine, ask)
    await engine.update_weights(str(folder))
    assert [piece.token_ids for piece in await heard(engine, ask)] == old
    await engine.sleep(2)
    await engine.wake_up(["weights"])
    await engine.update_weights(str(folder))
    assert engine.is_sleeping(), "its cache is"
    with pytest.raises(InputError, match="is sleeping"):
        await heard(engine, ask)
    await engine.wake_up(["cache"])
    assert not engine.is_sleeping()
    assert [piece.token_ids for piece in await heard(engine, ask)] == old
    await engine.close()


@pytest.mark.slow
def test_an_engine_that_comes_back_has_the_weights_it_had(folder: Path, tmp_path: Path) -> None:
    other = small()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.3)
    save_hf_checkpoint(other, tmp_path / "new")
    asyncio.run(_renewed(folder, tmp_path / "new"))


async def _closed_while_another_starts(folder: Path) -> None:
    engine = ProcessEngineClient(folder, EngineConfig(device="cpu"))
    assert engine.health_problem() == ""
    await asyncio.sleep(0)
    os.kill(engine.process.pid, signal.SIGKILL)
    while engine._starting is None:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)
    assert "another one is starting" in engine.health_problem()
    began_s = time.monotonic()
    await engine.close()
    assert time.monotonic() - began_s < 20


def test_an_engine_is_closed_at_once_also_while_another_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "born"))
    monkeypatch.setattr(process_client, "EngineProcess", Mortal)
    began_s = time.monotonic()
    asyncio.run(_closed_while_another_starts(tmp_path))
    # The loop waits for its threads, too.
    assert time.monotonic() - began_s < 40


async def _silences(folder: Path) -> list[str]:
    engine = ProcessEngineClient(folder, EngineConfig(device="cpu"), stuck_s=0.5)
    found = [engine.health_problem()]
    await asyncio.sleep(0.6)  # nobody asks, and it says nothing
    asked = engine.generate(Request(prompt_token_ids=PROMPT))
    found.append(engine.health_problem())
    await asyncio.sleep(0.6)
    found.append(engine.health_problem())
    await asked.aclose()
    found.append(engine.health_problem())
    await engine.close()
    return found


def test_an_engine_is_stuck_once_who_asks_hears_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "born"))
    monkeypatch.setattr(process_client, "EngineProcess", Mortal)
    began, asked, later, given_up = asyncio.run(_silences(tmp_path))
    assert (began, asked) == ("", "")
    assert "not been heard for 1 s" in later
    assert "not been heard" in given_up, "who gave up waiting has not mended it"


async def _never_done(folder: Path) -> None:
    engine = ProcessEngineClient(folder, EngineConfig(device="cpu"))
    engine._change_s = 0.5
    with pytest.raises(
        EngineDeadError, match=r"did not update weights within 0\.5 s, and was ended"
    ):
        await engine.update_weights("elsewhere")
    while not engine.health_problem():
        await asyncio.sleep(0.05)
    assert "ended by SIGKILL; another one is starting" in engine.health_problem()
    await engine.close()


def test_an_engine_that_never_comes_to_the_end_of_a_change_is_ended_at_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "born"))
    monkeypatch.setattr(process_client, "EngineProcess", Mortal)
    asyncio.run(asyncio.wait_for(_never_done(tmp_path), 120))


async def _long_change(folder: Path, reading: Path) -> None:
    engine = ProcessEngineClient(folder, EngineConfig(device="cpu"), stuck_s=0.3)
    reading.touch()
    change = asyncio.ensure_future(engine.update_weights("elsewhere"))
    await asyncio.sleep(0.6)
    assert engine.health_problem() == "", "it has a deadline of its own"
    reading.unlink()
    await change
    # Another process reads them again, and meanwhile others have to answer.
    reading.touch()
    os.kill(engine.process.pid, signal.SIGKILL)
    while "reads the weights of elsewhere again" not in engine.health_problem():
        await asyncio.sleep(0.02)
    with pytest.raises(EngineDeadError, match="reads the weights"):
        await heard(engine, Request(prompt_token_ids=PROMPT))
    await asyncio.sleep(0.6)
    assert "reads the weights" in engine.health_problem()
    reading.unlink()
    await come_to(engine)
    assert [
        piece.finish_reason for piece in await heard(engine, Request(prompt_token_ids=PROMPT))
    ] == ["stop"]
    await engine.close()


def test_an_engine_that_reads_weights_is_not_stuck_and_answers_nobody_before_it_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READING", str(tmp_path / "reading"))
    monkeypatch.setattr(process_client, "EngineProcess", Reading)
    asyncio.run(asyncio.wait_for(_long_change(tmp_path, tmp_path / "reading"), 120))


@pytest.mark.slow
def test_what_keeps_an_engine_from_starting_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        ProcessEngineClient(tmp_path, EngineConfig(device="cpu"))


async def _halves(folder: Path) -> None:
    settings = EngineConfig(scheduler_config=LIMITS, device="cpu", max_model_len=64)
    first, then = await asyncio.gather(
        *(asyncio.to_thread(ProcessEngineClient, folder, settings) for _ in range(2))
    )
    assert first.ready_message.supports_kv_transfer
    both = DisaggregatedEngineClient([first], [then], block_tokens=4)
    ask = Request(
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    )
    pieces = [piece async for piece in both.generate(ask)]
    assert [token for piece in pieces for token in piece.token_ids] == reference(small, PROMPT, 12)
    # What is never collected goes with the process that sent it.
    (sent,) = await heard(first, msgspec.structs.replace(ask, do_remote_decode=True))
    assert sent.kv_handle is not None
    place = Path(sent.kv_handle.address)
    assert place.exists()
    lost = msgspec.structs.replace(sent.kv_handle, address=f"{place}x")
    with pytest.raises(KVTransferError, match="is gone"):
        await heard(then, msgspec.structs.replace(ask, remote_kv=lost))
    short = KVTransferHandle(
        transport="shm", address=str(place), num_blocks=1, size_bytes=1, first_token_id=1
    )
    with pytest.raises((InputError, KVTransferError)):
        await heard(then, msgspec.structs.replace(ask, remote_kv=short))
    await both.close()
    assert not place.exists()
    assert not place.parent.exists()


@pytest.mark.slow
def test_prompts_go_from_process_to_process(folder: Path) -> None:
    asyncio.run(_halves(folder))
