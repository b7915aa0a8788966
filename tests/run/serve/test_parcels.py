"""Keys and values arrive whole, once, and only where their secret is known."""

import errno
import threading
import time
from pathlib import Path

import msgspec
import pytest

from meshwright.run.serve import parcels
from meshwright.run.serve.parcels import (
    ParcelLost,
    Post,
    SharedMemoryPost,
    TcpPost,
    Way,
    collect,
    post_of,
)

DATA = bytes(range(256)) * 9000


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_parcel_is_collected_once(way: Way) -> None:
    post = post_of(way)
    parcels = [post.send(DATA[:size], blocks=3, first=7) for size in (0, 10, len(DATA))]
    sent = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=type(each)) for each in parcels
    ]
    assert [bytes(collect(each)) for each in sent] == [b"", DATA[:10], DATA]
    with pytest.raises(ParcelLost):
        collect(parcels[1])
    post.close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_what_was_not_collected_is_gone_with_its_post(way: Way) -> None:
    post: Post = post_of(way)
    parcel = post.send(DATA, blocks=1, first=0)
    post.close()
    with pytest.raises(ParcelLost):
        collect(parcel)
    assert not Path(parcel.place).exists()


def test_without_the_secret_nothing_is_handed_out() -> None:
    post = post_of("tcp")
    parcel = post.send(DATA, blocks=1, first=0)
    with pytest.raises(ParcelLost, match="no longer"):
        collect(msgspec.structs.replace(parcel, secret="00" * 32))
    assert bytes(collect(parcel)) == DATA
    post.close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_what_nobody_collects_in_time_goes_though_nothing_else_is_sent(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "KEPT_S", 0.2)
    post = post_of(way)
    assert isinstance(post, SharedMemoryPost | TcpPost)
    parcel = post.send(DATA, blocks=1, first=0)
    until_s = time.monotonic() + 30
    while list(post._kept) and time.monotonic() < until_s:
        time.sleep(0.01)
    with pytest.raises(ParcelLost):
        collect(parcel)
    assert not Path(parcel.place).exists()
    post.close()


def test_a_folder_in_shared_memory_is_there_while_parcels_are(tmp_path: Path) -> None:
    folder = tmp_path / "parcels"
    post = post_of("shm", folder=str(folder))
    assert not folder.exists()
    parcel = post.send(DATA, blocks=1, first=0)
    assert Path(parcel.place).parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    post.close()
    assert not folder.exists()


def test_a_post_can_be_closed_while_it_sends(tmp_path: Path) -> None:
    folder = tmp_path / "parcels"
    post = post_of("shm", folder=str(folder))
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

    post = SharedMemoryPost(str(tmp_path / "parcels"))
    monkeypatch.setattr(Path, "write_bytes", fills)
    for _ in range(2):
        with pytest.raises(ParcelLost, match="are gone"):
            collect(post.send(DATA, blocks=1, first=0))
    assert not list((tmp_path / "parcels").iterdir()), "half of it would only take more room"
    (told,) = caplog.messages
    assert "No space left on device" in told
    monkeypatch.undo()
    assert bytes(collect(post.send(DATA, blocks=1, first=0))) == DATA
    post.close()
