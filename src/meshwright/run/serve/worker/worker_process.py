"""The process of an engine: takes asks from a socket, takes turns, sends pieces back.

`main` is what such a process does; `EngineStarter` is what engines elsewhere are started by. A
thread reads; everything else happens in the main thread, between turns. When the socket closes,
whoever started the process is gone, and it ends.
"""

import contextlib
import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from meshwright.errors import MeshwrightError
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.startup import StartedEngine, start_engine
from meshwright.run.serve.frame_codec import FrameDecoder
from meshwright.run.serve.worker.engine_worker import (
    LOG,
    EngineWorker,
    UtilityHandler,
    create_utility_handler,
    to_rejection_message,
)
from meshwright.run.serve.worker.protocol import (
    EngineMessage,
    EngineReady,
    StartEngine,
    WorkerMessage,
    encode_message,
    worker_message_decoder,
)

EngineStarter = Callable[[StartEngine], tuple[StartedEngine, UtilityHandler]]
"""Starts an engine; returns it with what performs calls."""
_LOOK_S = 0.5


class _Socket:
    """The way to the server."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._frames = FrameDecoder()

    def read(self) -> list[WorkerMessage]:
        """Wait for messages; none when the other side is gone."""
        while True:
            data = self._socket.recv(1 << 20)
            if not data:
                return []
            found = [worker_message_decoder.decode(body) for body in self._frames.feed(data)]
            if found:
                return found

    def is_gone(self, wait_s: float) -> bool:
        """Tell whether the other side goes within so long; what it says stays to be read."""
        hung_up = select.poll()
        hung_up.register(self._socket, 0)  # nothing but the end, which is always told
        return bool(hung_up.poll(wait_s * 1000))

    def send(self, message: EngineMessage) -> None:
        """Send a message; where the other side is gone nothing happens, as who reads hears so."""
        # To end here would be to end amid what the reader does before it ends this process.
        with contextlib.suppress(OSError):
            self._socket.sendall(encode_message(message))


def start_served_engine(first: StartEngine) -> tuple[StartedEngine, UtilityHandler]:
    """Start an engine that a server asks."""
    started = start_engine(first.source, first.config, kv_transfer_folder=first.kv_transfer_folder)
    return started, create_utility_handler(started.lifecycle)


def main(
    path: str,
    begin: EngineStarter = start_served_engine,
    orphaned: Callable[[], object] = lambda: None,
) -> None:
    """Serve whoever listens at a socket; `orphaned` is called when that one is gone."""
    # Ctrl-C in a terminal reaches all its processes; who started this one decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    way = _Socket(path)
    messages = deque(way.read())
    first = messages.popleft() if messages else None
    if not isinstance(first, StartEngine):
        return
    ready = threading.Event()
    threading.Thread(target=_watch, args=(way, ready), name="watch", daemon=True).start()
    try:
        if first.threads is not None:
            torch.set_num_threads(first.threads)
        started, perform = begin(first)
    except MeshwrightError as error:
        way.send(to_rejection_message(0, error))
        return
    ready.set()
    engine, took = started.engine, list(started.startup_s)
    worker = EngineWorker(way.send, engine, perform, whole=first.final_only)
    cache = engine.runner.kv_cache
    room = cache.num_blocks * cache.block_size
    told = (engine.max_model_len, engine.max_embed_len, room, took, engine.supports_kv_transfer)
    way.send(EngineReady(*told, engine.stats()))
    worker.post(*messages)
    gone = threading.Event()
    args = (way, worker, engine, orphaned, gone)
    threading.Thread(target=_read, args=args, name="reader", daemon=True).start()
    try:
        while not gone.is_set():
            if not worker.run_step():
                worker.wait_for_messages()
    except Exception:
        if not gone.is_set():
            raise
    # Who reads ends this process: to end here would be to end amid what it does before.
    threading.Event().wait()


def _watch(way: _Socket, ready: threading.Event) -> None:
    """End this process where whoever waits for its engine gives that up: starts take minutes."""
    while not ready.is_set():
        if way.is_gone(_LOOK_S) and not ready.is_set():
            os._exit(0)


def _read(
    way: _Socket,
    worker: EngineWorker,
    engine: Engine,
    orphaned: Callable[[], object],
    gone: threading.Event,
) -> None:
    """Hand messages over until the other side is gone, or says what nobody can read; then end."""
    # Whatever goes wrong here: a process that nobody asks must not keep its GPU.
    try:
        try:
            while messages := way.read():
                worker.post(*messages)
        except (MeshwrightError, msgspec.MsgspecError):
            LOG.exception("what the server says cannot be read")
        except OSError:
            pass
        gone.set()
        # Parcels that nobody collected would stay in shared memory.
        with contextlib.suppress(Exception):
            engine.close()
        orphaned()
    finally:
        os._exit(0)
