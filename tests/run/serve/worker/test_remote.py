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
from meshwright.run.nn.huggingface import save
from meshwright.run.serve.asked import Ask, Piece, Sampling
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.interface import EngineBroken
from meshwright.run.serve.parcels import Parcel, ParcelLost
from meshwright.run.serve.routed import HandedOver
from meshwright.run.serve.worker import remote
from meshwright.run.serve.worker.frames import Start
from meshwright.run.serve.worker.launch import EngineProcess
from meshwright.run.serve.worker.remote import RemoteEngine
from meshwright.spec.serving import Limits
from tests.run.serve.engine.small import reference
from tests.run.serve.model.small import small
from tests.run.serve.model.test_gguf import trained

LIMITS = Limits(batch_tokens=24, batch_requests=8, block_tokens=4, kv_blocks=64)
PROMPT = (5, 6, 7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(small(), tmp_path)
    trained(digits=True).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


class Mortal(EngineProcess):
    """A process without an engine, of which the second one is never ready."""

    def __init__(self, start: Start, **given: Any) -> None:
        super().__init__(start, "tests.run.serve.worker.mortal", **given)


class Reading(EngineProcess):
    """A process without an engine that reads weights while a file is there."""

    def __init__(self, start: Start, **given: Any) -> None:
        super().__init__(start, "tests.run.serve.worker.reading", **given)


async def heard(engine: RemoteEngine, ask: Ask) -> list[Piece]:
    return [piece async for piece in engine.answer(ask)]


async def come_to(engine: RemoteEngine) -> None:
    while engine.ill():
        await asyncio.sleep(0.05)


async def _life(folder: Path) -> None:
    engine = RemoteEngine(folder, EngineSettings(limits=LIMITS, device="cpu", max_length=64))
    assert engine.gauges().blocks == 64, "before anybody asked"
    asks = [
        Ask(prompt=PROMPT, sampling=Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)),
        Ask(prompt=PROMPT, sampling=Sampling(max_tokens=60, ignore_eos=True, n=2)),
    ]
    pieces = await heard(engine, asks[0])
    wanted = reference(small, PROMPT, 12)
    assert [token for piece in pieces for token in piece.tokens] == wanted
    with pytest.raises(InputError, match="no token"):
        await heard(engine, Ask(prompt=()))
    (vector,) = await engine.embed([PROMPT])
    assert sum(each * each for each in vector) == pytest.approx(1)
    with pytest.raises(InputError, match="poet"):
        await engine.embed([PROMPT], adapter="poet")
    # Death, in the midst of an answer of two choices.
    under_way = engine.answer(asks[1])
    await anext(under_way)
    os.kill(engine.process.pid, signal.SIGKILL)
    rest = [piece async for piece in under_way]
    ends = {piece.choice: piece for piece in rest if piece.finish == "error"}
    assert sorted(ends) == [0, 1]
    assert all("ended by SIGKILL" in piece.error for piece in ends.values())
    assert "another one is starting" in engine.ill()
    with pytest.raises(EngineBroken, match="SIGKILL"):
        await heard(engine, asks[0])
    await asyncio.wait_for(come_to(engine), 120)
    pieces = await heard(engine, asks[0])
    assert [token for piece in pieces for token in piece.tokens] == wanted
    # Two answers of the first process and the last one's; the beat that tells comes before its end.
    assert engine.gauges().prompt_tokens >= 2 * len(PROMPT)
    assert engine.gauges().output_tokens >= 24
    assert engine.gauges().running == 0
    process = engine.process
    await engine.close()
    assert "engine's process" in process.last_words()


@pytest.mark.slow
def test_an_engine_that_dies_says_so_and_comes_back(folder: Path) -> None:
    asyncio.run(_life(folder))


async def _renewed(folder: Path, new: Path) -> None:
    engine = RemoteEngine(folder, EngineSettings(limits=LIMITS, device="cpu", max_length=64))
    ask = Ask(prompt=PROMPT, sampling=Sampling(temperature=0.0, max_tokens=12, ignore_eos=True))
    old = [piece.tokens for piece in await heard(engine, ask)]
    await engine.update_weights(str(new))
    changed = [piece.tokens for piece in await heard(engine, ask)]
    assert changed != old
    os.kill(engine.process.pid, signal.SIGKILL)
    while not engine.ill():
        await asyncio.sleep(0.05)
    await asyncio.wait_for(come_to(engine), 120)
    assert [piece.tokens for piece in await heard(engine, ask)] == changed
    # Where they are gone, it answers nothing rather than with others.
    (new / "model.safetensors").rename(new / "hidden")
    os.kill(engine.process.pid, signal.SIGKILL)
    while "cannot be read again" not in engine.ill():
        await asyncio.sleep(0.05)
    with pytest.raises(EngineBroken, match="cannot be read again"):
        await heard(engine, ask)
    await engine.update_weights(str(folder))
    assert [piece.tokens for piece in await heard(engine, ask)] == old
    await engine.sleep(2)
    await engine.wake(["weights"])
    await engine.update_weights(str(folder))
    assert engine.asleep(), "its cache is"
    with pytest.raises(InputError, match="it sleeps"):
        await heard(engine, ask)
    await engine.wake(["cache"])
    assert not engine.asleep()
    assert [piece.tokens for piece in await heard(engine, ask)] == old
    await engine.close()


@pytest.mark.slow
def test_an_engine_that_comes_back_has_the_weights_it_had(folder: Path, tmp_path: Path) -> None:
    other = small()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.3)
    save(other, tmp_path / "new")
    asyncio.run(_renewed(folder, tmp_path / "new"))


async def _closed_while_another_starts(folder: Path) -> None:
    engine = RemoteEngine(folder, EngineSettings(device="cpu"))
    assert engine.ill() == ""
    await asyncio.sleep(0)
    os.kill(engine.process.pid, signal.SIGKILL)
    while engine._starting is None:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)
    assert "another one is starting" in engine.ill()
    began_s = time.monotonic()
    await engine.close()
    assert time.monotonic() - began_s < 20


def test_an_engine_is_closed_at_once_also_while_another_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "born"))
    monkeypatch.setattr(remote, "EngineProcess", Mortal)
    began_s = time.monotonic()
    asyncio.run(_closed_while_another_starts(tmp_path))
    # The loop waits for its threads, too.
    assert time.monotonic() - began_s < 40


async def _silences(folder: Path) -> list[str]:
    engine = RemoteEngine(folder, EngineSettings(device="cpu"), stuck_s=0.5)
    found = [engine.ill()]
    await asyncio.sleep(0.6)  # nobody asks, and it says nothing
    asked = engine.answer(Ask(prompt=PROMPT))
    found.append(engine.ill())
    await asyncio.sleep(0.6)
    found.append(engine.ill())
    await asked.aclose()
    found.append(engine.ill())
    await engine.close()
    return found


def test_an_engine_is_stuck_once_who_asks_hears_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "born"))
    monkeypatch.setattr(remote, "EngineProcess", Mortal)
    began, asked, later, given_up = asyncio.run(_silences(tmp_path))
    assert (began, asked) == ("", "")
    assert "not been heard for 1 s" in later
    assert "not been heard" in given_up, "who gave up waiting has not mended it"


async def _never_done(folder: Path) -> None:
    engine = RemoteEngine(folder, EngineSettings(device="cpu"))
    engine._change_s = 0.5
    with pytest.raises(EngineBroken, match=r"did not update weights within 0\.5 s, and was ended"):
        await engine.update_weights("elsewhere")
    while not engine.ill():
        await asyncio.sleep(0.05)
    assert "ended by SIGKILL; another one is starting" in engine.ill()
    await engine.close()


def test_an_engine_that_never_comes_to_the_end_of_a_change_is_ended_at_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORTAL", str(tmp_path / "born"))
    monkeypatch.setattr(remote, "EngineProcess", Mortal)
    asyncio.run(asyncio.wait_for(_never_done(tmp_path), 120))


async def _long_change(folder: Path, reading: Path) -> None:
    engine = RemoteEngine(folder, EngineSettings(device="cpu"), stuck_s=0.3)
    reading.touch()
    change = asyncio.ensure_future(engine.update_weights("elsewhere"))
    await asyncio.sleep(0.6)
    assert engine.ill() == "", "it has a deadline of its own"
    reading.unlink()
    await change
    # Another process reads them again, and meanwhile others have to answer.
    reading.touch()
    os.kill(engine.process.pid, signal.SIGKILL)
    while "reads the weights of elsewhere again" not in engine.ill():
        await asyncio.sleep(0.02)
    with pytest.raises(EngineBroken, match="reads the weights"):
        await heard(engine, Ask(prompt=PROMPT))
    await asyncio.sleep(0.6)
    assert "reads the weights" in engine.ill()
    reading.unlink()
    await come_to(engine)
    assert [piece.finish for piece in await heard(engine, Ask(prompt=PROMPT))] == ["stop"]
    await engine.close()


def test_an_engine_that_reads_weights_is_not_stuck_and_answers_nobody_before_it_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READING", str(tmp_path / "reading"))
    monkeypatch.setattr(remote, "EngineProcess", Reading)
    asyncio.run(asyncio.wait_for(_long_change(tmp_path, tmp_path / "reading"), 120))


@pytest.mark.slow
def test_what_keeps_an_engine_from_starting_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        RemoteEngine(tmp_path, EngineSettings(device="cpu"))


async def _halves(folder: Path) -> None:
    settings = EngineSettings(limits=LIMITS, device="cpu", max_length=64)
    first, then = await asyncio.gather(
        *(asyncio.to_thread(RemoteEngine, folder, settings) for _ in range(2))
    )
    assert first.ready.hands_over
    both = HandedOver([first], [then], block_tokens=4)
    ask = Ask(prompt=PROMPT, sampling=Sampling(temperature=0.0, max_tokens=12, ignore_eos=True))
    pieces = [piece async for piece in both.answer(ask)]
    assert [token for piece in pieces for token in piece.tokens] == reference(small, PROMPT, 12)
    # What is never collected goes with the process that sent it.
    (sent,) = await heard(first, msgspec.structs.replace(ask, hands_over=True))
    assert sent.parcel is not None
    place = Path(sent.parcel.place)
    assert place.exists()
    lost = msgspec.structs.replace(sent.parcel, place=f"{place}x")
    with pytest.raises(ParcelLost, match="are gone"):
        await heard(then, msgspec.structs.replace(ask, brought=lost))
    short = Parcel(way="shm", place=str(place), blocks=1, size=1, first=1)
    with pytest.raises((InputError, ParcelLost)):
        await heard(then, msgspec.structs.replace(ask, brought=short))
    await both.close()
    assert not place.exists()
    assert not place.parent.exists()


@pytest.mark.slow
def test_prompts_go_from_process_to_process(folder: Path) -> None:
    asyncio.run(_halves(folder))
