"""`EngineThread`: the engine in a thread of its own, which draws while the trainer trains."""

import queue
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from meshwright.run.posttrain.loop.sampling import Sampling
from meshwright.run.posttrain.loop.spans import Spans
from meshwright.run.posttrain.rollouts.generate import Stream
from meshwright.run.posttrain.rollouts.record import Key, Rollout


class _Begin(NamedTuple):
    keys: Sequence[Key]
    version: int


class _Renew(NamedTuple):
    version: int


class Renewed(NamedTuple):
    """The engine has a version of the weights."""

    version: int


class EngineFailed(NamedTuple):
    """The thread ended with an error."""

    error: BaseException


Heard = Rollout | Renewed | EngineFailed


class EngineThread:
    """Takes orders, and gives rollouts as they are complete.

    Everything of one order is asked before the engine takes its next turn: so what is computed
    together, and with it every bit, does not hang on how threads take turns.
    """

    def __init__(self, sampling: Sampling, spans: Spans) -> None:
        self._sampling, self._spans = sampling, spans
        self._orders: queue.SimpleQueue[_Begin | _Renew | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self.turns = 0
        """Taken so far: who waits sees by it whether anything happens."""
        # What was given to the device so far comes before anything of the thread's own stream.
        self._settle()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def begin(self, keys: Sequence[Key], version: int) -> None:
        """Begin rollouts by the weights that the engine has."""
        self._orders.put(_Begin(keys, version))

    def renew(self, version: int) -> None:
        """Let the engine take the trainer's weights, which stay as they are until it has them."""
        self._orders.put(_Renew(version))

    def next(self, timeout_s: float) -> Heard | None:
        """Return what the engine has to say; None where nothing comes in that time."""
        try:
            return self._heard.get(timeout=timeout_s) if timeout_s else self._heard.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the thread, with what is under way."""
        self._orders.put(None)
        self._thread.join()
        self._settle()

    def _settle(self) -> None:
        device = self._sampling.engine.runner.cache.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _work(self) -> None:
        device = self._sampling.engine.runner.cache.device
        on_gpu = device.type == "cuda"
        # A stream of its own, or kernels of both sides would wait for each other.
        own = _own_stream(device) if on_gpu else nullcontext()
        stream = Stream(self._sampling.generator)
        try:
            with own:
                while self._obey(stream, on_gpu=on_gpu):
                    with self._spans.doing("engines", "generate"):
                        while stream.busy and self._orders.empty():
                            for rollout in stream.turn():
                                self._heard.put(rollout)
                            self.turns += 1
                stream.close()
        except BaseException as error:  # noqa: BLE001  raised where somebody waits for rollouts
            self._heard.put(EngineFailed(error))

    def _obey(self, stream: Stream, *, on_gpu: bool) -> bool:
        """Carry out an order; wait for one where nothing is under way."""
        order = self._orders.get()
        if order is None:
            return False
        if isinstance(order, _Begin):
            stream.begin(order.keys, order.version)
            return True
        stream.renew(order.version, lambda: self._sampling.take(order.version))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self.turns += 1
        self._heard.put(Renewed(order.version))
        return True


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
