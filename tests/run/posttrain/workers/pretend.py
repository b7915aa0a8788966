"""A worker without a process: it says what a test tells it to, and dies when told."""

import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.workers.fleet import Fleet
from meshwright.run.posttrain.workers.process import SOURCES
from meshwright.run.serve.asked import Ask, Piece, Sampling
from meshwright.run.serve.worker.frames import (
    Answered,
    Call,
    Done,
    FromWorker,
    Ready,
    Several,
    ToWorker,
)


class Pretend:
    """One life of a worker."""

    def __init__(self, number: int, offered: Offered) -> None:
        self.name, self.ready, self._offered = f"pretend {number}", Ready(64, 64, 64, []), offered
        self._said: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()
        self.messages: list[ToWorker] = []
        self.gone = threading.Event()

    @property
    def calls(self) -> list[str]:
        return [each.what for each in self.messages if isinstance(each, Call)]

    @property
    def asked(self) -> list[list[int]]:
        """The prompts of each frame of asks."""
        frames = [each for each in self.messages if isinstance(each, Several)]
        return [[one.ask.prompt[0] for one in each.asks] for each in frames]

    def send(self, message: ToWorker, /) -> None:
        self.messages.append(message)
        if isinstance(message, Call):
            told = msgspec.msgpack.encode(self._offered.holds) if message.what == SOURCES else b""
            self._said.put(Done(message.number, told=told))

    def answer(self, *prompts: int) -> None:
        """Answer asks by the first tokens of their prompts, which come back."""
        frames = [each for each in self.messages if isinstance(each, Several)]
        asks = {each.ask.prompt[0]: each.number for frame in frames for each in frame.asks}
        pieces = [(asks[each], Piece(tokens=(each,), finish="stop")) for each in prompts]
        self._said.put(Answered(pieces))

    def say(self, message: FromWorker) -> None:
        self._said.put(message)

    def die(self) -> None:
        self._said.put(None)

    def heard(self) -> Iterator[FromWorker]:
        while (message := self._said.get()) is not None:
            yield message

    def last_words(self) -> str:
        return "it was told to die"

    def folder(self, offered: Offered, /) -> str:
        return str(offered.folder)

    def bring(self, offered: Offered, /) -> None:
        assert offered.files(), "a version is there before anybody is told to take it"

    def end(self) -> None:
        self.gone.set()
        self.die()


class Staged:
    """A fleet of such workers, and all that happened."""

    def __init__(self, count: int = 2, **given: Any) -> None:
        self.lives: list[list[Pretend]] = [[] for _ in range(count)]
        self.said: list[str] = []
        self.heard: list[tuple[int, str | None]] = []
        self.offered = Offered([{"w": Placed.all_of(torch.arange(6.0).view(2, 3))}])
        chosen: dict[str, Any] = {"restarts": 2, "stall_s": 60.0, "exact": False} | given
        self.fleet = Fleet(self._hire, count, self.offered, say=self.said.append, **chosen)

    def _hire(self, number: int) -> Pretend:
        self.lives[number].append(Pretend(number, self.offered))
        return self.lives[number][-1]

    def now(self, number: int) -> Pretend:
        """The present life of a worker."""
        return self.lives[number][-1]

    def ask(self, *prompts: int, near: int) -> list[Any]:
        found = []
        for prompt in prompts:
            ask = Ask(prompt=(prompt,), sampling=Sampling(seed=prompt), near=near)
            found += self.fleet.add(ask, partial(self._hear, prompt))
        return found

    def _hear(self, prompt: int, piece: Piece) -> None:
        assert piece.tokens in ((), (prompt,)), "an answer goes to who asked"
        self.heard.append((prompt, piece.finish))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.fleet.turn()
            for sink, piece in self.fleet.outbox():
                sink(piece)

    def until_life(self, number: int, lives: int) -> None:
        """Go on until a worker lives anew, and was told all that it has to know."""
        while len(self.lives[number]) < lives or not self.now(number).messages:
            self.turn()
