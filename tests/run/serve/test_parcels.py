"""Keys and values arrive whole, once, and only where their secret is known."""

from pathlib import Path

import msgspec
import pytest

from meshwright.run.serve.parcels import ParcelLost, Post, Way, collect, post_of

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
