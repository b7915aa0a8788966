"""The process of an engine: takes asks from a socket, takes turns, sends pieces back.

`main` is what such a process does; `Begin` is what engines elsewhere are started by. A thread
reads; everything else happens in the main thread, between turns. When the socket closes,
whoever started the process is gone, and it ends.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.serve.asked import Piece, joined
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.start import Started, start_engine
from meshwright.run.serve.engine.upkeep import Upkeep
from meshwright.run.serve.framing import Frames
from meshwright.run.serve.parcels import ParcelLost, collect
from meshwright.run.serve.worker.frames import (
    Answered,
    Asked,
    Beat,
    Call,
    Cancel,
    Done,
    FromWorker,
    Ready,
    Refused,
    Several,
    Start,
    ToWorker,
    framed,
    to_worker,
)

Perform = Callable[[Call], Done]
Begin = Callable[[Start], tuple[Started, Perform]]
"""Starts an engine; returns it with what performs calls."""
_BEAT_S = 0.25
_LOOK_S = 0.5


class _Socket:
    """The way to the server."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._frames = Frames()

    def read(self) -> list[ToWorker]:
        """Wait for messages; none when the other side is gone."""
        while True:
            data = self._socket.recv(1 << 20)
            if not data:
                return []
            found = [to_worker.decode(body) for body in self._frames.add(data)]
            if found:
                return found

    def is_gone(self, wait_s: float) -> bool:
        """Tell whether the other side goes within so long; what it says stays to be read."""
        hung_up = select.poll()
        hung_up.register(self._socket, 0)  # nothing but the end, which is always told
        return bool(hung_up.poll(wait_s * 1000))

    def send(self, message: FromWorker) -> None:
        """Send a message; where the other side is gone nothing happens, as who reads hears so."""
        # To end here would be to end amid what the reader does before it ends this process.
        with contextlib.suppress(OSError):
            self._socket.sendall(framed(message))


class Worker:
    """An engine and the messages for it."""

    def __init__(
        self, way: _Socket, engine: Engine, perform: Perform, *, whole: bool = False
    ) -> None:
        """Send pieces as they come, or answers `whole`."""
        self._way, self._engine, self._perform = way, engine, perform
        self._whole = whole
        self._inbox: deque[ToWorker] = deque()
        self._wake = threading.Event()
        self._answers: dict[int, list[Answer]] = {}
        self._ready: list[tuple[int, Piece]] = []
        self._brought: dict[int, bytearray | ParcelLost] = {}
        """Keys and values that came with asks, or why they did not."""
        self._fetching: set[int] = set()
        """Asks whose keys and values are on their way, and that nobody has cancelled."""
        self._beat_s = 0.0

    def take(self, messages: list[ToWorker]) -> None:
        """Hand messages over, from the thread that reads."""
        for message in messages:
            if isinstance(message, Cancel) and message.number in self._fetching:
                self._fetching.discard(message.number)
            elif isinstance(message, Asked) and message.ask.brought is not None:
                self._fetching.add(message.number)
                # It may take a while, in which the engine goes on with others.
                threading.Thread(target=self._fetch, args=(message,), daemon=True).start()
            else:
                self._inbox.append(message)
        self._wake.set()

    def _fetch(self, message: Asked) -> None:
        """Fetch the keys and values that an ask comes with, then hand it over."""
        assert message.ask.brought is not None
        brought: bytearray | ParcelLost
        try:
            brought = collect(message.ask.brought)
        except ParcelLost as error:
            brought = error
        if message.number not in self._fetching:
            return
        self._fetching.discard(message.number)
        self._brought[message.number] = brought
        self._inbox.append(message)
        self._wake.set()

    def _fetched(self, number: int) -> bytearray | None:
        brought = self._brought.pop(number, None)
        if isinstance(brought, ParcelLost):
            raise brought
        return brought

    def turn(self) -> None:
        """Do what was asked, then one step of the engine; sleep where there is nothing to do."""
        while self._inbox:
            self._do(self._inbox.popleft())
        worked = self._engine.turn()
        for sink, piece in self._engine.outbox():
            sink(piece)
        now = time.monotonic()
        idle = not worked and not self._inbox
        # Before the last pieces: who has them may ask no further, and has to know all figures.
        if idle or self._engine.is_idle or now - self._beat_s > _BEAT_S:
            self._beat_s = now
            self._way.send(Beat(self._engine.gauges()))
        if self._ready:
            self._way.send(Answered(self._ready))
            self._ready = []
        if idle:
            self._wake.wait()
            self._wake.clear()

    def _do(self, message: ToWorker) -> None:
        try:
            match message:
                case Asked(number, ask):
                    sink, brought = self._sink(number, ask.sampling.n), self._fetched(number)
                    self._answers[number] = self._engine.add(ask, sink, brought)
                case Several(asks):
                    for each in asks:
                        self._do(each)
                case Cancel(number):
                    self._engine.cancel(self._answers.pop(number, []))
                case Call():
                    self._way.send(self._perform(message))
                case Start():
                    pass
        except (InputError, ParcelLost) as error:
            assert not isinstance(message, Start | Several), "its parts are refused one by one"
            self._answers.pop(message.number, None)
            self._way.send(refused(message.number, error))

    def _sink(self, number: int, choices: int) -> Callable[[Piece], None]:
        left = choices
        parts: dict[int, list[Piece]] = {}

        def sink(piece: Piece) -> None:
            nonlocal left
            if self._whole:
                parts.setdefault(piece.choice, []).append(piece)
                if piece.finish is None:
                    return
                piece = joined(parts.pop(piece.choice))
            self._ready.append((number, piece))
            if piece.finish is not None:
                left -= 1
                if not left:
                    self._answers.pop(number, None)

        return sink


def refused(number: int, error: MeshwrightError) -> Refused:
    """Return an error as a message."""
    problems = getattr(error, "problems", None) or (Problem("engine", str(error), ""),)
    told = [(each.where, each.what, each.fix) for each in problems]
    return Refused(number, told, str(error) if isinstance(error, ParcelLost) else "")


def served(first: Start) -> tuple[Started, Perform]:
    """Start an engine that a server asks."""
    started = start_engine(first.source, first.settings)
    return started, performer(started.upkeep)


def main(path: str, begin: Begin = served, orphaned: Callable[[], object] = lambda: None) -> None:
    """Serve whoever listens at a socket; `orphaned` is called when that one is gone."""
    # Ctrl-C in a terminal reaches all its processes; who started this one decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    way = _Socket(path)
    messages = deque(way.read())
    first = messages.popleft() if messages else None
    if not isinstance(first, Start):
        return
    ready = threading.Event()
    threading.Thread(target=_watch, args=(way, ready), name="watch", daemon=True).start()
    try:
        if first.threads is not None:
            torch.set_num_threads(first.threads)
        started, perform = begin(first)
    except MeshwrightError as error:
        way.send(refused(0, error))
        return
    ready.set()
    worker = Worker(way, started.engine, perform, whole=first.whole)
    cache = started.engine.runner.cache
    room = cache.blocks * cache.block_tokens
    engine, took = started.engine, list(started.took)
    way.send(Ready(engine.max_length, room, took, engine.hands_over))
    worker.take(list(messages))
    args = (way, worker, engine, orphaned)
    threading.Thread(target=_read, args=args, name="reader", daemon=True).start()
    while True:
        worker.turn()


def _watch(way: _Socket, ready: threading.Event) -> None:
    """End this process where whoever waits for its engine gives that up: starts take minutes."""
    while not ready.is_set():
        if way.is_gone(_LOOK_S) and not ready.is_set():
            os._exit(0)


def _read(way: _Socket, worker: Worker, engine: Engine, orphaned: Callable[[], object]) -> None:
    while True:
        try:
            messages = way.read()
        except OSError:
            messages = []
        if not messages:
            # Parcels that nobody collected would stay in shared memory.
            engine.close()
            orphaned()
            os._exit(0)
        worker.take(messages)


def performer(upkeep: Upkeep) -> Perform:
    """Return what performs the calls of a server."""

    def perform(call: Call) -> Done:
        match call.what:
            case "embed":
                return Done(call.number, upkeep.embed(call.prompts, adapter=call.adapter))
            case "sleep":
                upkeep.sleep(call.level)
            case "wake":
                upkeep.wake(call.parts)
            case "update_weights":
                upkeep.update_weights(call.path)
            case _:
                what = f"an engine cannot {call.what}"
                raise InputError([Problem("call", what, "update both sides")])
        return Done(call.number)

    return perform
