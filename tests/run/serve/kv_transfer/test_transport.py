"""Keys and values arrive whole, once, and only where their secret is known."""

import errno
import threading
import time
from pathlib import Path

import msgspec
import pytest

from meshwright.run.serve.kv_transfer import transport
from meshwright.run.serve.kv_transfer.handle import KVSender, KVTransferError, KVTransport
from meshwright.run.serve.kv_transfer.transport import (
    SharedMemoryKVSender,
    TcpKVSender,
    create_kv_sender,
    receive_kv,
)

DATA = bytes(range(256)) * 9000


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_parcel_is_collected_once(way: KVTransport) -> None:
    post = create_kv_sender(way)
    parcels = [post.send(DATA[:size], blocks=3, first=7) for size in (0, 10, len(DATA))]
    sent = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=type(each)) for each in parcels
    ]
    assert [bytes(receive_kv(each)) for each in sent] == [b"", DATA[:10], DATA]
    with pytest.raises(KVTransferError):
        receive_kv(parcels[1])
    post.close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_what_was_not_collected_is_gone_with_its_post(way: KVTransport) -> None:
    post: KVSender = create_kv_sender(way)
    parcel = post.send(DATA, blocks=1, first=0)
    post.close()
    with pytest.raises(KVTransferError):
        receive_kv(parcel)
    assert not Path(parcel.address).exists()


def test_without_the_secret_nothing_is_handed_out() -> None:
    post = create_kv_sender("tcp")
    parcel = post.send(DATA, blocks=1, first=0)
    with pytest.raises(KVTransferError, match="no longer"):
        receive_kv(msgspec.structs.replace(parcel, secret="00" * 32))
    assert bytes(receive_kv(parcel)) == DATA
    post.close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_what_nobody_collects_in_time_goes_though_nothing_else_is_sent(
    way: KVTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HANDLE_TTL_S", 0.2)
    post = create_kv_sender(way)
    assert isinstance(post, SharedMemoryKVSender | TcpKVSender)
    parcel = post.send(DATA, blocks=1, first=0)
    until_s = time.monotonic() + 30
    while list(post._kept) and time.monotonic() < until_s:
        time.sleep(0.01)
    with pytest.raises(KVTransferError):
        receive_kv(parcel)
    assert not Path(parcel.address).exists()
    post.close()


def test_a_folder_in_shared_memory_is_there_while_parcels_are(tmp_path: Path) -> None:
    folder = tmp_path / "parcels"
    post = create_kv_sender("shm", folder=str(folder))
    assert not folder.exists()
    parcel = post.send(DATA, blocks=1, first=0)
    assert Path(parcel.address).parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    post.close()
    assert not folder.exists()


def test_a_post_can_be_closed_while_it_sends(tmp_path: Path) -> None:
    folder = tmp_path / "parcels"
    post = create_kv_sender("shm", folder=str(folder))
    sent: list[int] = []

    def send() -> None:
        for number in range(2000):
            post.send(b"keys", blocks=1, first=0)
            sent.append(number)

    sending = threading.Thread(target=send)
    sending.start()
    while not folder.exists():
        time.sleep(0.001)
    post.close()
    sending.join()
    assert len(sent) == 2000
    assert not folder.exists()


def test_what_shared_memory_has_no_room_for_is_lost_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fills(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:4096])
        raise OSError(errno.ENOSPC, "No space left on device")

    post = SharedMemoryKVSender(str(tmp_path / "parcels"))
    monkeypatch.setattr(Path, "write_bytes", fills)
    for _ in range(2):
        with pytest.raises(KVTransferError, match="is gone"):
            receive_kv(post.send(DATA, blocks=1, first=0))
    assert not list((tmp_path / "parcels").iterdir()), "half of it would only take more room"
    (told,) = caplog.messages
    assert "No space left on device" in told
    monkeypatch.undo()
    assert bytes(receive_kv(post.send(DATA, blocks=1, first=0))) == DATA
    post.close()
