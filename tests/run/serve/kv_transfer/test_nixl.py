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

from meshwright.errors import MissingDependency
from meshwright.run.serve.kv_transfer import nixl
from meshwright.run.serve.kv_transfer.handle import HANDLE_TTL_S, KVTransferError, KVTransferHandle
from meshwright.run.serve.kv_transfer.nixl import NixlKVSender
from meshwright.run.serve.kv_transfer.transport import create_kv_sender, receive_kv
from tests.run.serve.fake_nixl import Fake

DATA = bytes(range(256)) * 9000


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fake]]:
    home = SimpleNamespace(nixl_agent=Fake, nixl_agent_config=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "nixl._api", home)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    for name, value in (("states", []), ("broken", ""), ("mem_types", ["DRAM"])):
        monkeypatch.setattr(Fake, name, value)
    nixl._reader.cache_clear()
    yield Fake
    nixl._reader.cache_clear()


def reader() -> Fake:
    found = nixl._reader()._agent
    assert isinstance(found, Fake)
    return found


def sent(data: bytes = DATA) -> tuple[NixlKVSender, KVTransferHandle]:
    post = NixlKVSender()
    return post, post.send(data, blocks=3, first=7)


@pytest.mark.parametrize("size", [0, 10, 1 << 16, len(DATA)])
@pytest.mark.parametrize("states", [[], ["PROC", "PROC"]])
def test_a_parcel_is_collected_once(fake: type[Fake], size: int, states: list[str]) -> None:
    fake.states = states
    post, parcel = sent(DATA[:size])
    sent_on = msgspec.msgpack.decode(msgspec.msgpack.encode(parcel), type=KVTransferHandle)
    assert receive_kv(sent_on) == DATA[:size]
    with pytest.raises(KVTransferError, match="no longer valid"):
        receive_kv(parcel)
    (sender,) = (agent for name, agent in fake.agents.items() if name in parcel.address)
    assert sender.rooms
    post.close()
    assert not sender.rooms
    assert not reader().rooms
    assert reader().released == 3, "two to collect, one in vain"


def test_rooms_are_used_again_when_they_were_collected(fake: type[Fake]) -> None:
    post, first = sent()
    second = post.send(DATA[::-1], blocks=3, first=7)
    assert receive_kv(first) == DATA
    assert receive_kv(second) == DATA[::-1]
    third = post.send(DATA[1:], blocks=3, first=7)
    assert third.address in {first.address, second.address}
    assert receive_kv(third) == DATA[1:]


def test_what_nobody_collects_is_dropped_and_its_room_used_later(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    post, old = sent()
    now += HANDLE_TTL_S + 1
    new = post.send(DATA, blocks=3, first=7)
    assert new.address != old.address, "somebody may still be reading"
    with pytest.raises(KVTransferError, match="no longer"):
        receive_kv(old)
    now += nixl._WAIT_S
    assert post.send(DATA, blocks=3, first=7).address == old.address


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"secret": "00" * 32}, "no longer"),
        ({"size_bytes": 5}, "no longer"),
        ({"size_bytes": 1 << 28}, "NOT_FOUND"),
        ({"nixl_metadata": b"rubbish"}, "MISMATCH"),
        ({"address": "somebody@12"}, "NOT_FOUND"),
        ({"address": "somebody"}, "failed"),
        ({"secret": "x"}, "failed"),
    ],
)
def test_a_wrong_parcel_is_lost_and_the_right_one_is_not(
    fake: type[Fake], changed: dict[str, object], said: str
) -> None:
    _, parcel = sent()
    with pytest.raises(KVTransferError, match=said):
        receive_kv(msgspec.structs.replace(parcel, **changed))
    assert not reader().rooms
    assert receive_kv(parcel) == DATA


def test_a_sender_that_is_gone_is_forgotten(fake: type[Fake]) -> None:
    _, parcel = sent()
    for fake.broken, fake.states, said in (
        ("transfer", [], "REMOTE_DISCONNECT"),
        ("", ["PROC", "ERR"], "ended with ERR"),
    ):
        with pytest.raises(KVTransferError, match=said):
            receive_kv(parcel)
        assert not reader().known
        assert not reader().rooms
    fake.states = []
    assert receive_kv(parcel) == DATA, "connected anew"


def test_waiting_ends_and_memory_under_way_stays(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "_WAIT_S", 0.002)
    _, parcel = sent()
    fake.states = ["STUCK"]
    with pytest.raises(KVTransferError, match=r"nothing came for 0\.002 s"):
        receive_kv(parcel)
    assert len(reader().rooms) == 1, "what comes late is written there"
    assert reader().released == 0


def test_without_nixl_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    nixl._reader.cache_clear()
    with pytest.raises(MissingDependency, match="NIXL is not available") as raised:
        create_kv_sender("nixl")
    assert "pip install" in raised.value.hint
    with pytest.raises(KVTransferError, match="NIXL is not available"):
        receive_kv(
            KVTransferHandle(
                transport="nixl", address="a@1", num_blocks=1, size_bytes=1, first_token_id=1
            )
        )


def test_where_ucx_does_not_start_neither_does_the_engine(fake: type[Fake]) -> None:
    fake.broken = "start"
    with pytest.raises(MissingDependency, match=r"cannot start UCX.*BACKEND") as raised:
        NixlKVSender()
    assert "UCX_NET_DEVICES is lo" in raised.value.hint
    fake.broken, fake.mem_types = "", []
    with pytest.raises(MissingDependency, match="installed without"):
        NixlKVSender()


def test_closing_never_fails(fake: type[Fake]) -> None:
    NixlKVSender().close()
    post, parcel = sent()
    rows = post._used[0].rows
    assert rows[:32].any()
    fake.broken = "end"
    post.close()
    fake.broken = ""
    assert not rows[:32].any(), "who reads now finds no secret"
    with pytest.raises(KVTransferError, match="REMOTE_DISCONNECT"):
        receive_kv(parcel)


real = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")

SENDER = """
import base64, sys, msgspec
from meshwright.run.serve.kv_transfer.transport import create_kv_sender
post, data = create_kv_sender("nixl"), bytes(range(256)) * 9000
for line in sys.stdin:
    parcel = post.send(data[: int(line)], blocks=3, first=7)
    print(base64.b64encode(msgspec.msgpack.encode(parcel)).decode(), flush=True)
"""
COLLECTOR = """
import base64, sys, msgspec
from meshwright.run.serve.kv_transfer.transport import KVTransferError, KVTransferHandle, receive_kv
for line in sys.stdin:
    try:
        found = receive_kv(msgspec.msgpack.decode(base64.b64decode(line), type=KVTransferHandle))
        assert found == (bytes(range(256)) * 9000)[: len(found)]
        print(len(found), flush=True)
    except KVTransferError as error:
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
                places.add(msgspec.msgpack.decode(base64.b64decode(line))["address"])
                assert said(collector, line) == str(size)
                assert "no longer" in said(collector, line)
            assert len(places) == 2, "rooms of two sizes, each used again"
            line = said(sender, "10")
            sender.kill()
            sender.wait()
            assert "failed" in said(collector, line)
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
    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.serve.client.process_client import ProcessEngineClient
    from meshwright.run.serve.engine.engine_config import EngineConfig
    from meshwright.run.serve.request import Request
    from meshwright.run.serve.sampling_params import SamplingParams
    from meshwright.spec.scheduler_config import SchedulerConfig
    from tests.run.serve.engine.small import reference
    from tests.run.serve.model.small import small
    from tests.run.serve.model.test_gguf import trained

    save_hf_checkpoint(small(), folder)
    trained(digits=True).save(str(folder / "tokenizer.json"))
    limits = SchedulerConfig(
        max_num_batched_tokens=24, max_num_seqs=8, block_size=4, num_gpu_blocks=64
    )
    settings = EngineConfig(
        scheduler_config=limits, device="cpu", max_model_len=64, kv_transfer_backend="nixl"
    )
    first, then = await asyncio.gather(
        *(asyncio.to_thread(ProcessEngineClient, folder, settings) for _ in range(2))
    )
    drawn = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    ask = Request(prompt_token_ids=(5, 6, 7), sampling_params=drawn)
    (piece,) = [
        each async for each in first.generate(msgspec.structs.replace(ask, do_remote_decode=True))
    ]
    assert piece.kv_handle is not None
    assert piece.kv_handle.transport == "nixl"
    brought = msgspec.structs.replace(ask, remote_kv=piece.kv_handle)
    tokens = [token async for each in then.generate(brought) for token in each.token_ids]
    assert tokens == reference(small, (5, 6, 7), 12)
    with pytest.raises(KVTransferError, match="no longer"):
        _ = [each async for each in then.generate(brought)]
    await first.close()
    await then.close()
