"""`Worker`: an engine and the messages for it, whoever brings them.

One thread takes turns, and everything but fetching happens in it. What goes wrong with one ask, or
with prompts to embed, is told to whoever wanted it and harms nobody else. So is a change of the
engine, as sleep and new weights are, that leaves it as it was. One that breaks off in its midst is
told as well, and then ends the worker: nobody knows what it left.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.serve.asked import Ask, Piece, joined
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.doing import HalfRenewed, Unchanged
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.upkeep import Upkeep
from meshwright.run.serve.engine.vectors import Vectors
from meshwright.run.serve.parcels import Parcel, ParcelLost, collect
from meshwright.run.serve.worker.frames import (
    Answered,
    Asked,
    Beat,
    Call,
    Cancel,
    Done,
    FromWorker,
    Refused,
    Several,
    Start,
    ToWorker,
)

LOG = logging.getLogger("meshwright.server")
Perform = Callable[[Call], Done | Vectors]
"""Performs a call, or returns what is to go on with between turns."""
_BEAT_S = 0.25


class _Fetched(NamedTuple):
    """The keys and values that an ask comes with, or why they did not come."""

    asked: Asked
    brought: bytearray | ParcelLost


class Worker:
    """Does what messages say."""

    def __init__(
        self,
        send: Callable[[FromWorker], None],
        engine: Engine,
        perform: Perform,
        *,
        whole: bool = False,
    ) -> None:
        """Send pieces as they come, or answers `whole`."""
        self._send, self._engine, self._perform = send, engine, perform
        self._whole = whole
        self._inbox: deque[ToWorker | _Fetched] = deque()
        self._wake = threading.Event()
        self._answers: dict[int, list[Answer]] = {}
        self._ready: list[tuple[int, Piece]] = []
        self._fetching: set[int] = set()
        """Asks whose keys and values are on their way, and that nobody has cancelled."""
        self._embedding: dict[int, Vectors] = {}
        """Prompts to embed, those that came first in front."""
        self._beat_s = 0.0

    def take(self, *messages: ToWorker) -> None:
        """Hand messages over, from any thread."""
        self._inbox += messages
        self._wake.set()

    def rest(self) -> None:
        """Wait for messages, or until somebody takes none."""
        self._wake.wait()
        self._wake.clear()

    def turn(self) -> bool:
        """Do what was asked, then one step of the engine; tell whether there is more to do."""
        while self._inbox:
            self._do(self._inbox.popleft())
        embedded = self._embed()
        worked = self._engine.turn() or embedded
        for sink, piece in self._engine.outbox():
            sink(piece)
        now = time.monotonic()
        idle = not worked and not self._inbox and not self._embedding
        # Before the last pieces: who has them may ask no further, and has to know all figures.
        if idle or self._engine.is_idle or now - self._beat_s > _BEAT_S:
            self._beat_s = now
            self._send(Beat(self._engine.gauges()))
        if self._ready:
            self._send(Answered(self._ready))
            self._ready = []
        return not idle

    def _do(self, message: ToWorker | _Fetched) -> None:
        match message:
            case Asked(number, ask):
                self._try(number, lambda: self._ask(number, ask))
            case _Fetched(Asked(number, ask), brought):
                if number in self._fetching:
                    self._fetched(number)
                    self._try(number, lambda: self._add(number, ask, brought))
            case Several(asks):
                for each in asks:
                    self._do(each)
            case Cancel(number):
                self._cancel(number)
            case Call(number, "embed"):
                self._try(number, lambda: self._call(message))
            case Call():
                self._change(message)
            case Start():
                pass

    def _try(self, number: int, work: Callable[[], None]) -> bool:
        """Do something that leaves the engine as it is where it fails; tell whether it did not."""
        try:
            work()
            return True
        except MeshwrightError as error:
            self._send(refused(number, error))
        except Exception as error:
            LOG.exception("the engine could not do what it was asked")
            self._send(_failed(number, error))
        return False

    def _ask(self, number: int, ask: Ask) -> None:
        if ask.brought is None:
            self._add(number, ask)
            return
        self._engine.check(ask)
        self._fetching.add(number)
        self._engine.expected += 1
        # It may take a while, in which the engine goes on with others.
        args = (Asked(number, ask), ask.brought)
        threading.Thread(target=self._fetch, args=args, daemon=True).start()

    def _fetch(self, asked: Asked, parcel: Parcel) -> None:
        """Fetch the keys and values that an ask comes with, in a thread of its own."""
        brought: bytearray | ParcelLost
        try:
            brought = collect(parcel)
        except ParcelLost as error:
            brought = error
        except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for ever
            brought = ParcelLost(f"keys and values did not arrive: {error!r}")
        self._inbox.append(_Fetched(asked, brought))
        self._wake.set()

    def _fetched(self, number: int) -> None:
        self._fetching.discard(number)
        self._engine.expected -= 1

    def _add(self, number: int, ask: Ask, brought: bytearray | ParcelLost | None = None) -> None:
        if isinstance(brought, ParcelLost):
            raise brought
        answers = self._engine.add(ask, self._sink(number, ask.sampling.n), brought)
        self._answers[number] = answers

    def _call(self, call: Call) -> None:
        done = self._perform(call)
        if isinstance(done, Vectors):
            self._embedding[call.number] = done
        else:
            self._send(done)

    def _change(self, call: Call) -> None:
        """Change the engine; what may have broken off in its midst is told, and raised."""
        try:
            self._call(call)
        except MeshwrightError as error:
            self._send(refused(call.number, error))
            if isinstance(error, HalfRenewed):
                raise
        except Exception as error:
            self._send(_failed(call.number, error))
            raise

    def _cancel(self, number: int) -> None:
        if number in self._fetching:
            self._fetched(number)
        self._leave(number)
        self._engine.cancel(self._answers.pop(number, []))

    def _embed(self) -> bool:
        """Go on with the prompts to embed that came first; tell whether there were any."""
        if not self._embedding:
            return False
        number, vectors = next(iter(self._embedding.items()))

        def go_on() -> None:
            if vectors.go_on():
                self._leave(number)
                self._send(Done(number, vectors.found))

        if self._engine.runner.ranks > 1:
            # Where one of them fails nobody knows what the others wait for.
            go_on()
        elif not self._try(number, go_on):
            self._leave(number)
        return True

    def _leave(self, number: int) -> None:
        """Embed the prompts of a call no further."""
        if (vectors := self._embedding.pop(number, None)) is not None:
            vectors.leave()

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


def _failed(number: int, error: Exception) -> Refused:
    """Return as a message what nobody foresaw."""
    # It may go on to whoever asked a server, whom details are no business of.
    told = f"the engine failed at it ({type(error).__name__}); its log says why"
    return Refused(number, [], failed=told)


def refused(number: int, error: MeshwrightError) -> Refused:
    """Return an error as a message."""
    if isinstance(error, HalfRenewed | Unchanged):
        return Refused(number, [], failed=str(error))
    problems = getattr(error, "problems", None) or (Problem("engine", str(error), ""),)
    told = [(each.where, each.what, each.fix) for each in problems]
    return Refused(number, told, str(error) if isinstance(error, ParcelLost) else "")


def performer(upkeep: Upkeep) -> Perform:
    """Return what performs the calls of a server."""

    def perform(call: Call) -> Done | Vectors:
        match call.what:
            case "embed":
                return upkeep.vectors(call.prompts, adapter=call.adapter)
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
