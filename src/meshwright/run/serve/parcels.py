"""`Parcels`: keys and values on their way from one engine to another, behind one interface.

    parcel = post.send(rows)        in the engine that computed a prompt
    rows = collect(parcel)          in the engine that goes on

A parcel says where its bytes lie and can be sent as a message. Over shared memory they lie in a
file of `/dev/shm`; over TCP the sender keeps them until they are fetched with the parcel's secret;
through NIXL (`nixl_parcels`, where it is installed) they are read out of the sender's memory.
Each is collected once; what nobody collects is dropped after a while.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal, Protocol

import msgspec

from meshwright.errors import MeshwrightError

Way = Literal["shm", "tcp", "nixl"]
_LENGTH = struct.Struct("<Q")
_SECRET_BYTES = 32
KEPT_S = 120.0


class ParcelLost(MeshwrightError):
    """Keys and values did not arrive: the sender is gone, or kept them no longer."""


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """Where the keys and values of a prompt lie."""

    way: Way
    place: str
    """The file, HOST:PORT, or AGENT@ADDRESS."""
    secret: str = ""
    """What fetches it, over TCP and NIXL."""
    card: bytes = b""
    """How to reach the agent, over NIXL."""
    blocks: int
    size: int
    """Bytes of all blocks."""
    first: int
    """The token that was drawn behind the prompt."""
    likely: tuple[float, tuple[tuple[int, float], ...]] | None = None
    """How likely that token was, and which were likely in its place; where it was asked."""


class Post(Protocol):
    """Sends parcels."""

    def send(self, data: bytes | memoryview, *, blocks: int, first: int) -> Parcel:
        """Keep bytes until they are collected; return where they lie."""

    def close(self) -> None:
        """Drop what was not collected."""


class SharedMemoryPost:
    """Parcels between processes of one machine."""

    def __init__(self) -> None:
        root = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._folder = Path(mkdtemp(prefix="meshwright-parcels-", dir=root))
        self._kept: dict[Path, float] = {}
        self._number = 0

    def send(self, data: bytes | memoryview, *, blocks: int, first: int) -> Parcel:
        """Write bytes into a file that whoever goes on takes away."""
        self._sweep()
        self._number += 1
        path = self._folder / f"{self._number}"
        path.write_bytes(data)
        self._kept[path] = time.monotonic()
        return Parcel(way="shm", place=str(path), blocks=blocks, size=len(data), first=first)

    def close(self) -> None:
        """Drop what was not collected."""
        for path in self._kept:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _sweep(self) -> None:
        old = time.monotonic() - KEPT_S
        for path in [path for path, since in self._kept.items() if since < old]:
            path.unlink(missing_ok=True)
            del self._kept[path]


class TcpPost:
    """Parcels between machines; listens on loopback unless told otherwise."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._kept: dict[bytes, tuple[memoryview, float]] = {}
        self._lock = threading.Lock()
        self._listening = socket.create_server((host, port))
        self._place = f"{host}:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, name="parcels", daemon=True).start()

    def send(self, data: bytes | memoryview, *, blocks: int, first: int) -> Parcel:
        """Keep bytes until somebody who knows their secret fetches them."""
        secret, old = secrets.token_bytes(_SECRET_BYTES), time.monotonic() - KEPT_S
        with self._lock:
            self._kept = {key: kept for key, kept in self._kept.items() if kept[1] >= old}
            self._kept[secret] = (memoryview(data), time.monotonic())
        return Parcel(
            way="tcp", place=self._place, secret=secret.hex(), blocks=blocks, size=len(data),
            first=first,
        )  # fmt: skip

    def close(self) -> None:
        """Listen no longer, and drop what was not collected."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._kept = {}

    def _serve(self) -> None:
        while True:
            try:
                way, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._hand_out, args=(way,), daemon=True).start()

    def _hand_out(self, way: socket.socket) -> None:
        with way, contextlib.suppress(OSError):
            way.settimeout(KEPT_S)
            asked = b"".join(_received(way, _SECRET_BYTES))
            with self._lock:
                # Compared in constant time, so that secrets cannot be found byte by byte.
                match = next((key for key in self._kept if hmac.compare_digest(key, asked)), b"")
                data, _ = self._kept.pop(match, (memoryview(b""), 0.0))
            way.sendall(_LENGTH.pack(len(data)))
            way.sendall(data)


def post_of(way: Way, host: str = "127.0.0.1") -> Post:
    """Return what sends parcels one way."""
    if way == "nixl":
        from meshwright.run.serve.nixl_parcels import NixlPost

        return NixlPost()
    return SharedMemoryPost() if way == "shm" else TcpPost(host)


def collect(parcel: Parcel) -> bytearray:
    """Return the bytes of a parcel, which is then gone."""
    if parcel.way == "shm":
        return _from_file(parcel)
    if parcel.way == "nixl":
        from meshwright.run.serve.nixl_parcels import collect_nixl

        return collect_nixl(parcel)
    host, _, port = parcel.place.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=KEPT_S) as way:
            way.sendall(bytes.fromhex(parcel.secret))
            (size,) = _LENGTH.unpack(b"".join(_received(way, _LENGTH.size)))
            if size != parcel.size:
                raise ParcelLost(f"{parcel.place} keeps these keys and values no longer")
            found = bytearray()
            for part in _received(way, size):
                found += part
            return found
    except (OSError, ValueError) as error:
        raise ParcelLost(f"keys and values of {parcel.place} did not arrive: {error}") from error


def _from_file(parcel: Parcel) -> bytearray:
    path = Path(parcel.place)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != parcel.size:
                raise ParcelLost("keys and values in shared memory have another size")
            found = bytearray(parcel.size)
            file.readinto(found)
        path.unlink()
    except OSError as error:
        raise ParcelLost(f"keys and values in shared memory are gone: {error}") from error
    return found


def _received(way: socket.socket, size: int) -> Iterator[bytes]:
    while size:
        data = way.recv(min(size, 1 << 20))
        if not data:
            raise OSError("the connection was closed")
        size -= len(data)
        yield data
