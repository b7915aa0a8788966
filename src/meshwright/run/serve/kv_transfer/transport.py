"""`KVTransferHandle`: keys and values in transfer between engines, behind one interface.

    handle = sender.send(data, blocks=3, first=7)       in the engine that computed a prompt
    data = receive_kv(handle)                           in the engine that goes on

A handle says where its bytes lie and can be sent as a message. Over shared memory they lie in a
file of `/dev/shm`; over TCP the sender keeps them until they are fetched with the handle's secret;
through NIXL (`kv_transfer.nixl`, where it is installed) they are read out of the sender's memory.
Each is collected once; what nobody collects is dropped after a while.
"""

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Generic, TypeVar

from meshwright.run.serve.kv_transfer.handle import (
    HANDLE_TTL_S,
    KVSender,
    KVTransferError,
    KVTransferHandle,
    KVTransport,
)
from meshwright.run.serve.kv_transfer.nixl import NixlKVSender, receive_kv_nixl

LOG = logging.getLogger("meshwright.server")
_K = TypeVar("_K")
_V = TypeVar("_V")
_LENGTH = struct.Struct("<Q")
_SECRET_BYTES = 32


class _Kept(Generic[_K, _V]):
    """What waits to be collected; a thread lets go of what nobody collects in time."""

    def __init__(self, drop: Callable[[_K], object] = lambda _: None) -> None:
        """Keep nothing yet; `drop` is called for what is kept no longer."""
        self._drop = drop
        self._there: dict[_K, tuple[_V, float]] = {}
        self._sweeping: threading.Timer | None = None
        self.lock = threading.RLock()
        """For those who look at several things together."""

    def __iter__(self) -> Iterator[_K]:
        return iter(list(self._there))

    def put(self, key: _K, value: _V) -> None:
        """Keep a thing."""
        with self.lock:
            self._there[key] = value, time.monotonic()
            self._sweep_in(HANDLE_TTL_S)

    def take(self, key: _K) -> _V | None:
        """Return a thing and keep it no longer; None where it is not there."""
        with self.lock:
            return self._there.pop(key, (None, 0.0))[0]

    def drop_all(self) -> None:
        """Keep nothing any more."""
        with self.lock:
            if self._sweeping is not None:
                self._sweeping.cancel()
                self._sweeping = None
            there, self._there = self._there, {}
            for key in there:
                self._drop(key)

    def _sweep_in(self, wait_s: float) -> None:
        if self._sweeping is None:
            self._sweeping = threading.Timer(wait_s, self._sweep)
            self._sweeping.daemon = True
            self._sweeping.start()

    def _sweep(self) -> None:
        with self.lock:
            now, self._sweeping = time.monotonic(), None
            for key in [
                key for key, (_, since) in self._there.items() if now - since >= HANDLE_TTL_S
            ]:
                del self._there[key]
                self._drop(key)
            if self._there:
                oldest = min(since for _, since in self._there.values())
                self._sweep_in(max(0.0, oldest + HANDLE_TTL_S - now))


class SharedMemoryKVSender:
    """Parcels between processes of one machine."""

    def __init__(self, folder: str = "") -> None:
        """Keep them in a folder that is made when there is one to keep; "" takes one of its own."""
        self._folder = Path(folder or get_shared_memory_folder())
        self._kept: _Kept[Path, None] = _Kept(lambda path: path.unlink(missing_ok=True))
        self._number, self._closed = 0, False
        self._full = False
        """Whether it was told that there is too little room."""

    def send(self, data: bytes | memoryview, *, blocks: int, first: int) -> KVTransferHandle:
        """Write bytes into a file that whoever goes on takes away."""
        self._number += 1
        path = self._folder / f"{self._number}"
        with self._kept.lock:
            # Another thread may have closed it: what is sent then is lost, as all else is.
            if not self._closed and self._written(path, data):
                self._kept.put(path, None)
        return KVTransferHandle(
            transport="shm",
            address=str(path),
            num_blocks=blocks,
            size_bytes=len(data),
            first_token_id=first,
        )

    def _written(self, path: Path, data: bytes | memoryview) -> bool:
        """Write a parcel; one that there is no room for is lost, and nobody ends of it."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(data)
            return True
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            if not self._full:
                self._full = True
                LOG.warning(
                    "KV transfer through %s failed (%s): prompts that do not fit there are computed"
                    " again; give containers more shared memory, or use"
                    " --kv-transfer-backend tcp", self._folder.parent, error.strerror,
                )  # fmt: skip
            return False

    def close(self) -> None:
        """Drop what was not collected."""
        with self._kept.lock:
            self._closed = True
            self._kept.drop_all()
            with contextlib.suppress(OSError):
                self._folder.rmdir()


def get_shared_memory_folder() -> str:
    """Return where parcels in shared memory may lie: a folder that nobody else has or makes."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else gettempdir()
    return str(Path(root) / f"meshwright-kv-{secrets.token_hex(8)}")


class TcpKVSender:
    """Parcels between machines; listens on loopback unless told otherwise."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._kept: _Kept[bytes, memoryview] = _Kept()
        self._listening = socket.create_server((host, port))
        self._place = f"{host}:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, name="kv-sender", daemon=True).start()

    def send(self, data: bytes | memoryview, *, blocks: int, first: int) -> KVTransferHandle:
        """Keep bytes until somebody who knows their secret fetches them."""
        secret = secrets.token_bytes(_SECRET_BYTES)
        self._kept.put(secret, memoryview(data))
        return KVTransferHandle(
            transport="tcp",
            address=self._place,
            secret=secret.hex(),
            num_blocks=blocks,
            size_bytes=len(data),
            first_token_id=first,
        )

    def close(self) -> None:
        """Listen no longer, and drop what was not collected."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._kept.drop_all()

    def _serve(self) -> None:
        while True:
            try:
                way, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._hand_out, args=(way,), daemon=True).start()

    def _hand_out(self, way: socket.socket) -> None:
        with way, contextlib.suppress(OSError):
            way.settimeout(HANDLE_TTL_S)
            asked = b"".join(_received(way, _SECRET_BYTES))
            with self._kept.lock:
                # Compared in constant time, so that secrets cannot be found byte by byte.
                match = next((key for key in self._kept if hmac.compare_digest(key, asked)), b"")
                data = self._kept.take(match) or memoryview(b"")
            way.sendall(_LENGTH.pack(len(data)))
            way.sendall(data)


def create_kv_sender(way: KVTransport, host: str = "127.0.0.1", *, folder: str = "") -> KVSender:
    """Return what sends parcels one way; `folder` is where they lie in shared memory."""
    if way == "nixl":
        return NixlKVSender()
    return SharedMemoryKVSender(folder) if way == "shm" else TcpKVSender(host)


def receive_kv(handle: KVTransferHandle) -> bytearray:
    """Return the bytes of a parcel, which is then gone."""
    if handle.transport == "shm":
        return _from_file(handle)
    if handle.transport == "nixl":
        return receive_kv_nixl(handle)
    host, _, port = handle.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=HANDLE_TTL_S) as way:
            way.sendall(bytes.fromhex(handle.secret))
            (size,) = _LENGTH.unpack(b"".join(_received(way, _LENGTH.size)))
            if size != handle.size_bytes:
                raise KVTransferError(f"the KV handle of {handle.address} is no longer valid")
            found = bytearray()
            for part in _received(way, size):
                found += part
            return found
    except (OSError, ValueError) as error:
        raise KVTransferError(f"KV transfer of {handle.address} failed: {error}") from error


def _from_file(handle: KVTransferHandle) -> bytearray:
    path = Path(handle.address)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != handle.size_bytes:
                raise KVTransferError(
                    "KV transfer failed: the data in shared memory has another size"
                )
            found = bytearray(handle.size_bytes)
            file.readinto(found)
        path.unlink()
    except OSError as error:
        raise KVTransferError(
            f"KV transfer failed: the data in shared memory is gone: {error}"
        ) from error
    return found


def _received(way: socket.socket, size: int) -> Iterator[bytes]:
    while size:
        data = way.recv(min(size, 1 << 20))
        if not data:
            raise OSError("the connection was closed")
        size -= len(data)
        yield data
