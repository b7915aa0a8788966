"""A worker without a process: it says what a test tells it to, and dies when told."""

import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender
from meshwright.run.posttrain.workers.worker_main import SOURCES
from meshwright.run.posttrain.workers.worker_pool import RolloutWorkerPool
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.worker.protocol import (
    AddRequests,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    UtilityCall,
    UtilityResult,
    WorkerMessage,
)


class Pretend:
    """One life of a worker."""

    def __init__(self, number: int, offered: WeightSender) -> None:
        self.name, self.ready_message, self._offered = (
            f"pretend {number}",
            EngineReady(64, 64, 64, []),
            offered,
        )
        self._said: queue.SimpleQueue[EngineMessage | None] = queue.SimpleQueue()
        self.messages: list[WorkerMessage] = []
        self.gone = threading.Event()

    @property
    def calls(self) -> list[str]:
        return [each.method for each in self.messages if isinstance(each, UtilityCall)]

    @property
    def asked(self) -> list[list[int]]:
        """The prompts of each frame of asks."""
        frames = [each for each in self.messages if isinstance(each, AddRequests)]
        return [[one.request.prompt_token_ids[0] for one in each.requests] for each in frames]

    def send(self, message: WorkerMessage, /) -> None:
        self.messages.append(message)
        if isinstance(message, UtilityCall):
            told = (
                msgspec.msgpack.encode(self._offered.shards) if message.method == SOURCES else b""
            )
            self._said.put(UtilityResult(message.call_id, payload=told))

    def answer(self, *prompts: int) -> None:
        """Answer asks by the first tokens of their prompts, which come back."""
        frames = [each for each in self.messages if isinstance(each, AddRequests)]
        asks = {
            each.request.prompt_token_ids[0]: each.request_id
            for frame in frames
            for each in frame.requests
        }
        pieces = [
            (asks[each], RequestOutput(token_ids=(each,), finish_reason="stop")) for each in prompts
        ]
        self._said.put(EngineOutputs(pieces))

    def say(self, message: EngineMessage) -> None:
        self._said.put(message)

    def die(self) -> None:
        self._said.put(None)

    def receive_messages(self) -> Iterator[EngineMessage]:
        while (message := self._said.get()) is not None:
            yield message

    def exit_reason(self) -> str:
        return "it was told to die"

    def version_folder(self, offered: WeightSender, /) -> str:
        return str(offered.folder)

    def deliver_version(self, offered: WeightSender, /) -> None:
        assert offered.list_files(), "a version is there before anybody is told to take it"

    def stop(self) -> None:
        self.gone.set()
        self.die()


class Staged:
    """A fleet of such workers, and all that happened."""

    def __init__(self, count: int = 2, **given: Any) -> None:
        self.lives: list[list[Pretend]] = [[] for _ in range(count)]
        self.said: list[str] = []
        self.heard: list[tuple[int, str | None]] = []
        self.offered = WeightSender([{"w": ShardedTensor.unsharded(torch.arange(6.0).view(2, 3))}])
        chosen: dict[str, Any] = {
            "max_restarts": 2,
            "stall_timeout_s": 60.0,
            "exact": False,
        } | given
        self.fleet = RolloutWorkerPool(
            self._hire, count, self.offered, say=self.said.append, **chosen
        )

    def _hire(self, number: int) -> Pretend:
        self.lives[number].append(Pretend(number, self.offered))
        return self.lives[number][-1]

    def now(self, number: int) -> Pretend:
        """The present life of a worker."""
        return self.lives[number][-1]

    def ask(self, *prompts: int, near: int) -> list[Any]:
        found = []
        for prompt in prompts:
            ask = Request(
                prompt_token_ids=(prompt,),
                sampling_params=SamplingParams(seed=prompt),
                routing_group=near,
            )
            found += self.fleet.add_request(ask, partial(self._hear, prompt))
        return found

    def _hear(self, prompt: int, piece: RequestOutput) -> None:
        assert piece.token_ids in ((), (prompt,)), "an answer goes to who asked"
        self.heard.append((prompt, piece.finish_reason))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.fleet.step()
            for sink, piece in self.fleet.take_outputs():
                sink(piece)

    def until_life(self, number: int, lives: int) -> None:
        """Go on until a worker lives anew, and was told all that it has to know."""
        while len(self.lives[number]) < lives or not self.now(number).messages:
            self.turn()
