"""Keys and values go through NIXL: with agents that fail as told, and with real ones."""

import asyncio
import base64
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from meshwright.errors import MissingPart
from meshwright.run.serve import nixl_parcels
from meshwright.run.serve.nixl_parcels import NixlPost
from meshwright.run.serve.parcels import KEPT_S, Parcel, ParcelLost, collect, post_of
from tests.run.serve.fake_nixl import Fake

DATA = bytes(range(256)) * 9000


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fake]]:
    home = SimpleNamespace(nixl_agent=Fake, nixl_agent_config=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "nixl._api", home)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    for name, value in (("states", []), ("broken", ""), ("mem_types", ["DRAM"])):
        monkeypatch.setattr(Fake, name, value)
    nixl_parcels._reader.cache_clear()
    yield Fake
    nixl_parcels._reader.cache_clear()


def reader() -> Fake:
    found = nixl_parcels._reader()._agent
    assert isinstance(found, Fake)
    return found


def sent(data: bytes = DATA) -> tuple[NixlPost, Parcel]:
    post = NixlPost()
    return post, post.send(data, blocks=3, first=7)


@pytest.mark.parametrize("size", [0, 10, 1 << 16, len(DATA)])
@pytest.mark.parametrize("states", [[], ["PROC", "PROC"]])
def test_a_parcel_is_collected_once(fake: type[Fake], size: int, states: list[str]) -> None:
    fake.states = states
    post, parcel = sent(DATA[:size])
    sent_on = msgspec.msgpack.decode(msgspec.msgpack.encode(parcel), type=Parcel)
    assert collect(sent_on) == DATA[:size]
    with pytest.raises(ParcelLost, match="keeps these keys and values no longer"):
        collect(parcel)
    (sender,) = (agent for name, agent in fake.agents.items() if name in parcel.place)
    assert sender.rooms
    post.close()
    assert not sender.rooms
    assert not reader().rooms
    assert reader().released == 3, "two to collect, one in vain"


def test_rooms_are_used_again_when_they_were_collected(fake: type[Fake]) -> None:
    post, first = sent()
    second = post.send(DATA[::-1], blocks=3, first=7)
    assert collect(first) == DATA
    assert collect(second) == DATA[::-1]
    third = post.send(DATA[1:], blocks=3, first=7)
    assert third.place in {first.place, second.place}
    assert collect(third) == DATA[1:]


def test_what_nobody_collects_is_dropped_and_its_room_used_later(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    post, old = sent()
    now += KEPT_S + 1
    new = post.send(DATA, blocks=3, first=7)
    assert new.place != old.place, "somebody may still be reading"
    with pytest.raises(ParcelLost, match="no longer"):
        collect(old)
    now += nixl_parcels._WAIT_S
    assert post.send(DATA, blocks=3, first=7).place == old.place


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"secret": "00" * 32}, "no longer"),
        ({"size": 5}, "no longer"),
        ({"size": 1 << 28}, "NOT_FOUND"),
        ({"card": b"rubbish"}, "MISMATCH"),
        ({"place": "somebody@12"}, "NOT_FOUND"),
        ({"place": "somebody"}, "did not arrive"),
        ({"secret": "x"}, "did not arrive"),
    ],
)
def test_a_wrong_parcel_is_lost_and_the_right_one_is_not(
    fake: type[Fake], changed: dict[str, object], said: str
) -> None:
    _, parcel = sent()
    with pytest.raises(ParcelLost, match=said):
        collect(msgspec.structs.replace(parcel, **changed))
    assert not reader().rooms
    assert collect(parcel) == DATA


def test_a_sender_that_is_gone_is_forgotten(fake: type[Fake]) -> None:
    _, parcel = sent()
    for fake.broken, fake.states, said in (
        ("transfer", [], "REMOTE_DISCONNECT"),
        ("", ["PROC", "ERR"], "ended with ERR"),
    ):
        with pytest.raises(ParcelLost, match=said):
            collect(parcel)
        assert not reader().known
        assert not reader().rooms
    fake.states = []
    assert collect(parcel) == DATA, "connected anew"


def test_waiting_ends_and_memory_under_way_stays(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_parcels, "_WAIT_S", 0.002)
    _, parcel = sent()
    fake.states = ["STUCK"]
    with pytest.raises(ParcelLost, match=r"nothing came for 0\.002 s"):
        collect(parcel)
    assert len(reader().rooms) == 1, "what comes late is written there"
    assert reader().released == 0


def test_without_nixl_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    nixl_parcels._reader.cache_clear()
    with pytest.raises(MissingPart, match="cannot go through NIXL") as raised:
        post_of("nixl")
    assert "pip install" in raised.value.hint
    with pytest.raises(ParcelLost, match="cannot go through NIXL"):
        collect(Parcel(way="nixl", place="a@1", blocks=1, size=1, first=1))


def test_where_ucx_does_not_start_neither_does_the_engine(fake: type[Fake]) -> None:
    fake.broken = "start"
    with pytest.raises(MissingPart, match=r"cannot start UCX.*BACKEND") as raised:
        NixlPost()
    assert "UCX_NET_DEVICES is lo" in raised.value.hint
    fake.broken, fake.mem_types = "", []
    with pytest.raises(MissingPart, match="installed without"):
        NixlPost()


def test_closing_never_fails(fake: type[Fake]) -> None:
    NixlPost().close()
    post, parcel = sent()
    rows = post._used[0].rows
    assert rows[:32].any()
    fake.broken = "end"
    post.close()
    fake.broken = ""
    assert not rows[:32].any(), "who reads now finds no secret"
    with pytest.raises(ParcelLost, match="REMOTE_DISCONNECT"):
        collect(parcel)


real = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")

SENDER = """
import base64, sys, msgspec
from meshwright.run.serve.parcels import post_of
post, data = post_of("nixl"), bytes(range(256)) * 9000
for line in sys.stdin:
    parcel = post.send(data[: int(line)], blocks=3, first=7)
    print(base64.b64encode(msgspec.msgpack.encode(parcel)).decode(), flush=True)
"""
COLLECTOR = """
import base64, sys, msgspec
from meshwright.run.serve.parcels import Parcel, ParcelLost, collect
for line in sys.stdin:
    try:
        found = collect(msgspec.msgpack.decode(base64.b64decode(line), type=Parcel))
        assert found == (bytes(range(256)) * 9000)[: len(found)]
        print(len(found), flush=True)
    except ParcelLost as error:
        print(error, flush=True)
"""


def said(process: "subprocess.Popen[str]", line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@real
@pytest.mark.real
@pytest.mark.slow
def test_two_processes_and_one_that_is_killed() -> None:
    sender, collector = (
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for code in (SENDER, COLLECTOR)
    )
    with sender, collector:
        try:
            places = set()
            for size in (0, 10, len(DATA), len(DATA) - 1):
                line = said(sender, str(size))
                places.add(msgspec.msgpack.decode(base64.b64decode(line))["place"])
                assert said(collector, line) == str(size)
                assert "no longer" in said(collector, line)
            assert len(places) == 2, "rooms of two sizes, each used again"
            line = said(sender, "10")
            sender.kill()
            sender.wait()
            assert "did not arrive" in said(collector, line)
        finally:
            sender.kill()
            collector.kill()


@real
@pytest.mark.real
@pytest.mark.slow
def test_prompts_go_from_engine_to_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="runs a model")
    pytest.importorskip("tokenizers", reason="reads a tokenizer")
    asyncio.run(_halves(tmp_path))


async def _halves(folder: Path) -> None:
    from meshwright.run.nn.huggingface import save
    from meshwright.run.serve.asked import Ask, Sampling
    from meshwright.run.serve.engine.settings import EngineSettings
    from meshwright.run.serve.worker.remote import RemoteEngine
    from meshwright.spec.serving import Limits
    from tests.run.serve.engine.small import reference
    from tests.run.serve.model.small import small
    from tests.run.serve.model.test_gguf import trained

    save(small(), folder)
    trained(digits=True).save(str(folder / "tokenizer.json"))
    limits = Limits(batch_tokens=24, batch_requests=8, block_tokens=4, kv_blocks=64)
    settings = EngineSettings(limits=limits, device="cpu", max_length=64, parcels="nixl")
    first, then = await asyncio.gather(
        *(asyncio.to_thread(RemoteEngine, folder, settings) for _ in range(2))
    )
    drawn = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    ask = Ask(prompt=(5, 6, 7), sampling=drawn)
    (piece,) = [each async for each in first.answer(msgspec.structs.replace(ask, hands_over=True))]
    assert piece.parcel is not None
    assert piece.parcel.way == "nixl"
    brought = msgspec.structs.replace(ask, brought=piece.parcel)
    tokens = [token async for each in then.answer(brought) for token in each.tokens]
    assert tokens == reference(small, (5, 6, 7), 12)
    with pytest.raises(ParcelLost, match="no longer"):
        _ = [each async for each in then.answer(brought)]
    await first.close()
    await then.close()
