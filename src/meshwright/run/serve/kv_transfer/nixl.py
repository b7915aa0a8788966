"""`NixlKVSender`: parcels whose bytes are read out of the sender's memory through NIXL.

In front of the bytes lies a head: a secret and their size. Who collects reads both, holds the head
against the parcel, and writes zeros over it: that tells the sender that the room is free. Rooms
stay registered and are used again, so that nobody reads memory that was given back. Nothing is
pickled, as NIXL's own lists would be: a parcel names a room by its address.
"""

import contextlib
import functools
import hmac
import importlib
import logging
import os
import secrets
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MissingDependency
from meshwright.run.serve.kv_transfer.handle import HANDLE_TTL_S, KVTransferError, KVTransferHandle

_HEAD = struct.Struct("<32sQ")
_WAIT_S = 60.0
"""How long collecting may take: so much longer a room stays as it was."""


def load_nixl() -> Any:
    """Return NIXL's interface; raise where it is not installed."""
    try:
        found = importlib.import_module("nixl._api")
    except ImportError as error:
        hint = "pip install 'meshwright[nixl]', or use --kv-transfer-backend shm or tcp"
        raise MissingDependency(f"KV transfer over NIXL is not available: {error}", hint) from None
    if "NIXL_LOG_LEVEL" not in os.environ:
        # It tells of every agent on stdout, where commands write their results.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return found


def _agent(*, answers: bool) -> Any:
    """Make an agent; one that answers others has a thread for that."""
    # Who reaches UCX's port can read this process: only this machine, unless somebody wants more.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    nixl = load_nixl()
    config = nixl.nixl_agent_config(enable_prog_thread=answers, backends=["UCX"])
    try:
        agent = nixl.nixl_agent(f"meshwright-{secrets.token_hex(8)}", config)
        if not agent.get_backend_mem_types("UCX"):
            raise RuntimeError("it was installed without")
    except Exception as error:
        hint = f"UCX_NET_DEVICES is {os.environ['UCX_NET_DEVICES']}: `ip link` lists what there is"
        raise MissingDependency(f"NIXL cannot start UCX: {error!r}", hint) from error
    return agent


@dataclass(eq=False)
class _Room:
    """Registered memory of the sender."""

    rows: NDArray[np.uint8]
    card: bytes
    registered: object
    since: float = 0.0


class NixlKVSender:
    """Parcels between processes that UCX connects."""

    def __init__(self) -> None:
        # What collects starts with the engine: where NIXL does not work, that fails.
        _reader()
        self._agent: Any = None
        self._used: list[_Room] = []
        self._free: list[_Room] = []

    def send(self, data: bytes | memoryview, *, blocks: int, first: int) -> KVTransferHandle:
        """Keep bytes where somebody who knows their secret reads them."""
        if self._agent is None:
            # Not before: engines that only collect would pay for its thread.
            self._agent = _agent(answers=True)
        self._sweep()
        size, secret = len(data), secrets.token_bytes(32)
        room = self._room(_HEAD.size + size)
        view = room.rows.data
        view[_HEAD.size : _HEAD.size + size] = data
        view[: _HEAD.size] = _HEAD.pack(secret, size)
        room.since = time.monotonic()
        self._used.append(room)
        return KVTransferHandle(
            transport="nixl",
            address=f"{self._agent.name}@{room.rows.ctypes.data}",
            nixl_metadata=room.card,
            secret=secret.hex(),
            num_blocks=blocks,
            size_bytes=size,
            first_token_id=first,
        )

    def close(self) -> None:
        """Let nobody read any more, then give the memory back."""
        for room in self._used + self._free:
            room.rows[: _HEAD.size] = 0
            # Whoever closes is about to end, with the agent or without.
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(room.registered)
        self._agent, self._used, self._free = None, [], []

    def _sweep(self) -> None:
        """Take rooms back whose bytes were collected, or kept for too long."""
        now = time.monotonic()
        for room in list(self._used):
            head, age = room.rows[: _HEAD.size], now - room.since
            if age > HANDLE_TTL_S + _WAIT_S or (age <= HANDLE_TTL_S and not head.any()):
                self._used.remove(room)
                self._free.append(room)
            elif age > HANDLE_TTL_S:
                head[:] = 0

    def _room(self, least: int) -> _Room:
        size = 1 << max(16, (least - 1).bit_length())
        for room in self._free:
            if len(room.rows) == size:
                self._free.remove(room)
                return room
        rows = np.empty(size, np.uint8)
        registered = self._agent.register_memory([(rows.ctypes.data, size, 0, "")], "DRAM")
        card = self._agent.get_partial_agent_metadata(registered, True, ["UCX"])
        return _Room(rows, card, registered)


class _Reader:
    """Collects for all threads of a process."""

    def __init__(self) -> None:
        self._agent = _agent(answers=False)
        self._lock = threading.Lock()  # An agent serves one thread at a time.
        self._moving: dict[int, object] = {}
        """Memory that may still be written, by address; where nothing ever came it stays."""

    def read(self, handle: KVTransferHandle) -> bytearray:
        """Return the bytes of a parcel, and let its sender know."""
        name, _, place = handle.address.rpartition("@")
        head = _HEAD.pack(bytes.fromhex(handle.secret), handle.size_bytes)
        found, until = bytearray(len(head) + handle.size_bytes), time.monotonic() + _WAIT_S
        rows = np.frombuffer(found, np.uint8)
        here, there = rows.ctypes.data, int(place)
        with self._lock:
            self._agent.add_remote_agent(handle.nixl_metadata)
            registered = self._agent.register_memory([(here, len(found), 0, "")], "DRAM")
        try:
            self._move("READ", name, rows, there, until)
            if not hmac.compare_digest(found[: len(head)], head):
                raise KVTransferError(f"the KV handle of {name} is no longer valid")
            rows[: len(head)] = 0
            self._move("WRITE", name, rows[: len(head)], there, until)
        finally:
            if here not in self._moving:
                with self._lock:
                    self._agent.deregister_memory(registered)
        del rows, found[: len(head)]
        return found

    def forget(self, name: str) -> None:
        """Drop what is known of a sender: a new connection may work where one broke."""
        with self._lock, contextlib.suppress(Exception):
            self._agent.remove_remote_agent(name)

    def _move(
        self, what: str, name: str, rows: NDArray[np.uint8], there: int, until: float
    ) -> None:
        agent, here, pause = self._agent, rows.ctypes.data, 1e-4
        with self._lock:
            ends = [agent.get_xfer_descs([(at, len(rows), 0)], "DRAM") for at in (here, there)]
            handle = agent.initialize_xfer(what, *ends, name)
            state = agent.transfer(handle)
        self._moving[here] = (rows, handle)
        while state == "PROC":
            if time.monotonic() > until:
                raise TimeoutError(f"nothing came for {_WAIT_S:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
            with self._lock:
                state = agent.check_xfer_state(handle)
        del self._moving[here]
        with self._lock:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"NIXL ended with {state}")


_reader = functools.cache(_Reader)


def receive_kv_nixl(handle: KVTransferHandle) -> bytearray:
    """Return the bytes of a parcel, which is then gone."""
    name = handle.address.rpartition("@")[0]
    try:
        reader = _reader()
    except MissingDependency as error:
        raise KVTransferError(str(error)) from error
    try:
        return reader.read(handle)
    except KVTransferError:
        raise
    except Exception as error:  # NIXL's errors have no other base
        reader.forget(name)
        raise KVTransferError(f"KV transfer of {name} failed: {error!r}") from error
